"""One connection to the broker, made when it is needed, every wait bounded."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

from .events import Event


class Unreachable(Exception):
    """The broker was not reached, did not answer, or did not take the event."""


class Connection:
    """`nkey`: a seed, the path of a file with one, or "" for none. Each step takes at most `timeout_s`."""

    def __init__(self, url: str, nkey: str = "", timeout_s: float = 1.0) -> None:
        self._url, self._nkey, self._timeout_s = url, nkey, timeout_s
        self._client: Any = None
        self._heard = ""

    async def publish(self, event: Event) -> None:
        """Store one event; returns when the broker holds it. Unreachable says why it does not."""
        self._heard = ""
        try:
            client = await self._connected()
            answer = await client.request(event.subject, event.data, timeout=self._timeout_s, headers=event.headers)
            stored = json.loads(answer.data)
        except Exception as error:  # whatever a library raises, the harness goes on
            raise Unreachable(f"{self._url}: {str(error) or self._heard or type(error).__name__}") from error
        if not isinstance(stored, dict) or "error" in stored:
            raise Unreachable(f"{self._url} did not store the event: {answer.data[:200]!r}")

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(Exception):
                await client.close()

    async def _hear(self, error: Exception) -> None:
        """nats-py would print it; a connection that fails ends with a time-out alone, and this is why."""
        self._heard = str(error)

    async def _connected(self) -> Any:
        import nats  # takes longer to import than all else here

        if self._client is None or not self._client.is_connected:
            await self.close()
            seed = _seed(self._nkey)
            async with asyncio.timeout(self._timeout_s):
                self._client = await nats.connect(
                    self._url,
                    name="ei-harness",
                    connect_timeout=max(1, round(self._timeout_s)),
                    allow_reconnect=False,
                    error_cb=self._hear,
                    nkeys_seed_str=seed,
                    inbox_prefix="_INBOX.harness" if seed else "_INBOX",
                )
        return self._client


def _seed(nkey: str) -> str | None:
    if not nkey or (nkey.startswith("SU") and "/" not in nkey):
        return nkey or None
    return Path(nkey).read_text().strip()
