"""Branch events on their way into the stream: in order, and again until the broker has them."""

import asyncio

from structlog.typing import FilteringBoundLogger

from schemas.branch import BranchEvent
from schemas.codec import encode
from schemas.subjects import Subjects
from services.bus import Bus, BusError, PayloadTooLarge
from services.router.metrics import RouterMetrics

_CAPACITY = 10_000
_AGAIN_S = 0.5


class Outbox:
    """Up to `capacity` events wait for a broker that is away; beyond that they are lost, counted and logged."""

    def __init__(
        self, bus: Bus, subjects: Subjects, metrics: RouterMetrics, log: FilteringBoundLogger, capacity: int = _CAPACITY
    ) -> None:
        self._bus, self._subjects, self._metrics, self._log = bus, subjects, metrics, log
        self._waiting: asyncio.Queue[BranchEvent] = asyncio.Queue(capacity)

    def add(self, event: BranchEvent) -> None:
        """Store this event after those before it."""
        try:
            self._waiting.put_nowait(event)
        except asyncio.QueueFull:
            self._lost(event, f"{self._waiting.maxsize} events wait already")

    async def run(self) -> None:
        """Store events until cancelled."""
        while True:
            event = await self._waiting.get()
            await self._store(event)
            self._waiting.task_done()

    async def stored(self) -> None:
        """Wait until everything added so far is in the stream."""
        await self._waiting.join()

    async def _store(self, event: BranchEvent) -> None:
        subject, data = self._subjects.branch_event(event.branch, event.tenant), encode(event)
        while True:
            try:
                await self._bus.store(subject, data, event.id)
                return
            except PayloadTooLarge as error:
                self._lost(event, str(error))
                return
            except BusError as error:
                self._log.warning("branch_event_waits", branch=event.branch, type=event.type, error=str(error))
                await asyncio.sleep(_AGAIN_S)

    def _lost(self, event: BranchEvent, why: str) -> None:
        self._metrics.events_lost.labels(event.type.value).inc()
        self._log.error("branch_event_lost", branch=event.branch, type=event.type, why=why)
