"""One directory serves: its heartbeat, standing by while a newer one serves, and serving again after it.

One that cannot be heard must not serve: no other would stand by for it, nor take over after it.
"""

from collections.abc import Awaitable, Callable

from structlog.typing import FilteringBoundLogger

from schemas.codec import RejectedMessage, encode
from schemas.subjects import Subjects
from schemas.telemetry import DIRECTORY_TELEMETRY, DirectoryTelemetry
from services.bus import Bus, BusError, BusRefused, Delivery
from services.bus.refusals import Refusal
from services.clock import Clock, incarnation_above
from services.directory.core.directory import Directory
from services.directory.core.seniority import Seniority


class Standby:
    """`key`: where the key is with which this one speaks to the broker. `step_down` is awaited when a newer directory
    serves; `take_over` with a new incarnation when it is gone, or when pools have heard one above this one's own."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        name: str,
        key: str,
        core: Directory,
        clock: Clock,
        log: FilteringBoundLogger,
        *,
        takeover_s: float,
        step_down: Callable[[], Awaitable[None]],
        take_over: Callable[[int], Awaitable[None]],
    ) -> None:
        self._bus, self._subjects, self._name, self._key = bus, subjects, name, key
        self._core, self._clock, self._log = core, clock, log
        self._seniority = Seniority(core.incarnation, takeover_s)
        self._step_down, self._take_over = step_down, take_over

    @property
    def serves(self) -> bool:
        return self._seniority.newer is None

    async def start(self) -> None:
        """Hear other directories from now on. BusRefused when the broker has refused the first `beat`."""
        self._check_heard()
        await self._bus.subscribe(self._subjects.telemetry_directory(Subjects.ANY), self._hear)

    async def tick(self) -> None:
        """Once a second: take over if it is time, and say that this one lives; BusRefused if it must not say so."""
        self._check_heard()
        newer = self._seniority.newer
        if newer is not None and self._seniority.due(self._clock.now()):
            await self._serve_above(newer)
        await self.beat()

    async def beat(self) -> None:
        """Say that this one lives, if it serves."""
        if self.serves:
            await self._beat(blind=self._core.blind)

    async def outrank(self, incarnation: int) -> None:
        """Pools have heard a directory of this incarnation: whoever serves after it has to be above."""
        if self.serves and incarnation > self._seniority.incarnation:
            await self._serve_above(incarnation)

    async def leave(self) -> None:
        """Let another directory know that this one goes."""
        if self.serves:
            await self._beat(blind=True)

    async def _serve_above(self, incarnation: int) -> None:
        self._seniority.succeed(incarnation_above(incarnation))
        self._log.warning("takes_over", above=incarnation, incarnation=self._seniority.incarnation)
        await self._take_over(self._seniority.incarnation)

    async def _hear(self, delivery: Delivery) -> None:
        try:
            told = DIRECTORY_TELEMETRY.decode(delivery.data)
        except RejectedMessage as error:
            self._log.warning("rejected", subject=delivery.subject, error=str(error))
            return
        if self._seniority.hear(told.incarnation, self._clock.now(), blind=told.blind):
            self._log.warning("stands_by", directory=told.directory, incarnation=told.incarnation)
            await self._step_down()

    def _check_heard(self) -> None:
        refusal = str(Refusal("publish", self._subjects.telemetry_directory(self._name)))
        if refusal in self._bus.refusals():
            raise BusRefused(f"{refusal}: the key, {self._key}, is not one of a directory named {self._name!r}")

    async def _beat(self, *, blind: bool) -> None:
        told = DirectoryTelemetry(
            directory=self._name,
            t=self._clock.wall(),
            incarnation=self._seniority.incarnation,
            blind=blind,
            blocks=self._core.tree.blocks,
        )
        try:
            await self._bus.publish(self._subjects.telemetry_directory(self._name), encode(told))
        except BusError as error:
            self._log.warning("heartbeat_lost", error=str(error))
