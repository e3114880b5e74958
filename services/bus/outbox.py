"""Stored messages that must not be lost while the broker is away."""

import asyncio
import random
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from services.bus.types import Bus, BusRefused, BusTimeout, BusUnavailable, NoResponders, PayloadTooLarge, StreamError
from services.observe import RateLimitedLog

_RETRY_FROM_S, _RETRY_TO_S = 0.1, 1.0
_AT_ONCE = 64


class _Letter(NamedTuple):
    subject: str
    data: bytes
    message_id: str
    headers: Mapping[str, str] | None


class Outbox:
    """Stores messages in order, trying each until the broker holds it; their ids make a repeated one harmless.

    Holds at most `limit` messages; `dropped` counts those that found it full and those too large for the broker.
    """

    def __init__(self, bus: Bus, log: RateLimitedLog, *, limit: int = 65_536) -> None:
        self.dropped = 0
        self._bus, self._log, self._limit = bus, log, limit
        self._letters: deque[_Letter] = deque()
        self._wake, self._empty = asyncio.Event(), asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._letters)

    def put(self, subject: str, data: bytes, message_id: str, headers: Mapping[str, str] | None = None) -> bool:
        """Take a message to be stored; False if there is no room."""
        if len(self._letters) >= self._limit:
            self.dropped += 1
            self._log.warning("outbox_full", subject=subject, limit=self._limit)
            return False
        self._letters.append(_Letter(subject, data, message_id, headers))
        self._empty.clear()
        self._wake.set()
        return True

    async def run(self) -> None:
        """Store what is put, for as long as it runs; a task of the service."""
        while True:
            await self._wake.wait()
            await self._store_all()
            self._wake.clear()
            self._empty.set()

    async def join(self) -> None:
        """Wait until everything put so far is stored; bound it with a timeout."""
        await self._empty.wait()

    async def _store_all(self) -> None:
        """Several at once, but never two of one subject, so that each subject stays in order."""
        while self._letters:
            batch: dict[str, _Letter] = {}
            for letter in self._letters:
                if len(batch) == _AT_ONCE or letter.subject in batch:
                    break
                batch[letter.subject] = letter
            stored = await asyncio.gather(*(self._stored(letter) for letter in batch.values()))
            kept = [letter for letter, done in zip(batch.values(), stored, strict=True) if not done]
            for _ in batch:
                self._letters.popleft()
            self._letters.extendleft(reversed(kept))
            if kept:
                await asyncio.sleep(random.uniform(_RETRY_FROM_S, _RETRY_TO_S))

    async def _stored(self, letter: _Letter) -> bool:
        """Try once; False to try again."""
        try:
            await self._bus.store(letter.subject, letter.data, letter.message_id, letter.headers)
        except (BusUnavailable, BusTimeout, BusRefused, NoResponders, StreamError) as error:
            self._log.warning("store_delayed", kind=type(error).__name__, error=str(error), waiting=len(self._letters))
            return False
        except PayloadTooLarge as error:
            self.dropped += 1
            self._log.warning("store_impossible", subject=letter.subject, error=str(error))
        return True
