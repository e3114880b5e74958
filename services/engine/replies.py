"""Updates of legs on their way to the routers: one message per router and turn of the event loop."""

import asyncio

from structlog.typing import FilteringBoundLogger

from schemas.codec import encode
from schemas.serve import LegUpdate, ReplyBatch
from schemas.subjects import Subjects
from services.bus import Bus, BusError
from services.clock import Clock

UPDATES_AT_ONCE = 2000
_TOKENS_AT_ONCE_BYTES = 256 << 10
_AGAIN_S = 0.1


class Replies:
    """Collects updates and sends them in order. While the broker is away they wait; nothing is lost by that."""

    def __init__(
        self, bus: Bus, subjects: Subjects, node: str, incarnation: int, clock: Clock, log: FilteringBoundLogger
    ) -> None:
        self._bus, self._subjects, self._clock, self._log = bus, subjects, clock, log
        self._node, self._incarnation = node, incarnation
        self._waiting: dict[str, list[LegUpdate]] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def add(self, router: str, update: LegUpdate) -> None:
        """Send this update with the others of this turn."""
        self._waiting.setdefault(router, []).append(update)
        self._idle.clear()
        self._wake.set()

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            waiting, self._waiting = self._waiting, {}
            for router, updates in waiting.items():
                for part in _parts(updates):
                    await self._send(router, part)
            if not self._waiting:
                self._idle.set()

    async def sent(self) -> None:
        """Wait until everything added so far has been sent."""
        await self._idle.wait()

    async def _send(self, router: str, updates: list[LegUpdate]) -> None:
        batch = ReplyBatch(node=self._node, incarnation=self._incarnation, t=self._clock.wall(), updates=updates)
        data = encode(batch)
        while True:
            try:
                await self._bus.publish(self._subjects.reply(router), data)
                return
            except BusError as error:
                self._log.warning("reply_waits", router=router, updates=len(updates), error=str(error))
                await asyncio.sleep(_AGAIN_S)


def _parts(updates: list[LegUpdate]) -> list[list[LegUpdate]]:
    """Cut what does not fit into one message."""
    parts: list[list[LegUpdate]] = [[]]
    size = 0
    for update in updates:
        if len(parts[-1]) >= UPDATES_AT_ONCE or (parts[-1] and size + len(update.tokens) > _TOKENS_AT_ONCE_BYTES):
            parts.append([])
            size = 0
        parts[-1].append(update)
        size += len(update.tokens)
    return parts
