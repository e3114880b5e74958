"""The few JetStream requests we need, as JSON over the ordinary request path."""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from services.bus.types import StreamError

API = "$JS.API"
_TIMEOUT_S = 5.0
_NAME_IN_USE = 10058
_NOT_FOUND = 404
_DUPLICATE_WINDOW_S = 120.0

Ask = Callable[[str, bytes, float], Awaitable[bytes]]


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def stream_config(name: str, subjects: list[str], max_age_s: float | None, last_per_subject: bool) -> dict[str, Any]:
    """A file-backed stream that drops its oldest messages at its limits."""
    window_s = min(_DUPLICATE_WINDOW_S, max_age_s) if max_age_s else _DUPLICATE_WINDOW_S
    return {
        "name": name,
        "subjects": subjects,
        "retention": "limits",
        "storage": "file",
        "discard": "old",
        "max_age": nanoseconds(max_age_s or 0),
        "max_msgs_per_subject": 1 if last_per_subject else -1,
        "duplicate_window": nanoseconds(window_s),
    }


def checked(reply: bytes, subject: str) -> dict[str, Any]:
    """The JSON of an API reply; StreamError with the broker's own words."""
    try:
        answer = msgspec.json.decode(reply, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise StreamError(f"{subject}: the broker's answer is not JSON: {error}") from error
    refusal = answer.get("error")
    if refusal:
        text = f"{subject}: {refusal.get('description', 'refused')}"
        raise StreamError(text, refusal.get("err_code", 0) or refusal.get("code", 0))
    return answer


class JetStream:
    """Streams and consumers of one broker; `ask` is a request of the bus."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def call(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """One API request; StreamError when the broker refuses."""
        subject = f"{API}.{path}"
        return checked(await self._ask(subject, msgspec.json.encode(body) if body else b"", _TIMEOUT_S), subject)

    async def ensure_stream(self, config: dict[str, Any]) -> None:
        """Create a stream, or change an existing one to `config`; what `config` does not name (replicas) stays."""
        name = config["name"]
        try:
            await self.call(f"STREAM.CREATE.{name}", config)
        except StreamError as error:
            if error.code != _NAME_IN_USE:
                raise
            existing = (await self.call(f"STREAM.INFO.{name}"))["config"]
            if any(existing.get(key) != value for key, value in config.items()):
                await self.call(f"STREAM.UPDATE.{name}", existing | config)

    async def stream_of(self, subject: str) -> str:
        """The name of the stream that takes `subject`; StreamError if there is none."""
        names = (await self.call("STREAM.NAMES", {"subject": subject})).get("streams") or []
        if not names:
            raise StreamError(f"no stream takes {subject}", _NOT_FOUND)
        return str(names[0])

    async def last_sequence(self, stream: str) -> int:
        return int((await self.call(f"STREAM.INFO.{stream}"))["state"]["last_seq"])

    async def has_consumer(self, stream: str, name: str) -> bool:
        try:
            await self.call(f"CONSUMER.INFO.{stream}.{name}")
        except StreamError as error:
            if error.code not in (_NOT_FOUND, 10014):
                raise
            return False
        return True

    async def create_consumer(self, stream: str, config: dict[str, Any]) -> None:
        path = f"CONSUMER.CREATE.{stream}.{config['name']}.{config['filter_subject']}"
        await self.call(path, {"stream_name": stream, "config": config})

    async def delete_consumer(self, stream: str, name: str) -> None:
        await self.call(f"CONSUMER.DELETE.{stream}.{name}")
