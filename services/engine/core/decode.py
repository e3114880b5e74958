"""Decode legs outside the engine: held until the prefill node asks for room, granted in fair order."""

from dataclasses import dataclass

from schemas.serve import Finish, Handoff, HandoffReply, RequestState, ServeRequest
from services.engine.backend import LegKey
from services.engine.core.effects import CancelInside, Effect, Prefilled, Report, Submit
from services.engine.core.legs import DECODE, LegTable, QueuedLeg
from services.engine.core.limits import Limits
from services.engine.core.prefill import FULL, UNKNOWN

Answer = tuple[HandoffReply, list[Effect]]
_STILL_ASKING_S = 0.5
"""A leg whose prefill node has not asked again for this long no longer keeps younger ones waiting."""


@dataclass(slots=True)
class DecodeHold:
    """The decode half of the node's queue: no leg takes device memory before its prefill is about to run."""

    table: LegTable
    limits: Limits

    def begin(self, leg: QueuedLeg) -> list[Effect]:
        """The prompt is here; the leg waits for its prefill node."""
        leg.prompt_here = True
        return []

    def redirect(self, leg: QueuedLeg, request: ServeRequest) -> None:
        """Another prefill node or transfer id for a leg that still waits."""
        leg.request = request

    def reserve(self, ask: Handoff, now: float, room_tokens: int) -> Answer:
        """May this leg enter the engine now? Granting twice is granting once.

        A leg that found no room lets younger ones that fit pass for `patience_s`; from then on none passes it.
        """
        key = LegKey(ask.id, ask.attempt, DECODE)
        inside = self.table.inside[DECODE].get(key)
        if inside is not None and inside.state is RequestState.RESERVED and inside.ending is None:
            known = inside.request.room == ask.room and inside.peer == ask.node
            return self._answer(known, UNKNOWN), []
        leg = self.table.waiting[DECODE].get(key)
        if leg is None or leg.request.room != ask.room or leg.peer != ask.node:
            return self._answer(granted=False, reason=UNKNOWN), []
        if not leg.prompt_here:
            return self._answer(granted=False, reason=FULL), []
        count = len(self.table.inside[DECODE])
        free = count < self.limits.max_running + self.limits.spare_decodes and leg.need_tokens <= room_tokens
        if not free or self._overtakes(leg, now):
            leg.asked_at = now if leg.asked_at is None else leg.asked_at
            leg.last_asked_at = now
            return self._answer(granted=False, reason=FULL), []
        self.table.enter(leg)
        report = Report(key, leg.request.router, state=RequestState.RESERVED)
        return self._answer(granted=True), [Submit(key, ask.rendezvous, 0), report]

    def done(self, message: Handoff) -> Answer:
        """The prefill has ended: the leg may decode. Said twice it is done once."""
        key = LegKey(message.id, message.attempt, DECODE)
        leg = self.table.inside[DECODE].get(key)
        if leg is None or leg.ending is not None or leg.request.room != message.room or message.token is None:
            return self._answer(granted=False, reason=UNKNOWN), []
        if leg.token is not None:
            return self._answer(granted=True), []
        leg.token = message.token
        return self._answer(granted=True), [Prefilled(key, message.token)]

    def abort(self, message: Handoff, now: float) -> Answer:
        """The prefill will not come: release what is reserved. Of another transfer id: not meant for this leg."""
        leg = self.table.find(LegKey(message.id, message.attempt, DECODE))
        if leg is None or leg.request.room != message.room:
            return self._answer(granted=False, reason=UNKNOWN), []
        return self._answer(granted=True), self.stop(leg, Finish.CANCELLED, f"prefill: {message.reason}", now)

    def left(self, leg: QueuedLeg, finish: Finish, reason: str, now: float) -> list[Effect]:
        """The leg has left the engine."""
        finish, reason = leg.ending or (finish, reason)
        return self.table.end(leg, finish, reason, now)

    def stop(self, leg: QueuedLeg, finish: Finish, reason: str, now: float) -> list[Effect]:
        """End a leg for a reason of our own: at once if it waits, else through the engine."""
        if leg.key in self.table.inside[DECODE]:
            if leg.ending is not None:
                return []
            leg.ending = (finish, reason)
            return [CancelInside(leg.key)]
        return self.table.end(leg, finish, reason, now)

    def check(self) -> None:
        count = len(self.table.inside[DECODE])
        assert count <= self.limits.max_running + self.limits.spare_decodes, count

    def _overtakes(self, leg: QueuedLeg, now: float) -> bool:
        """Whether another leg has waited for room before this one, and beyond its patience."""
        mine = now if leg.asked_at is None else leg.asked_at
        return any(
            other.asked_at < mine
            and now - other.asked_at > self.limits.patience_s
            and now - other.last_asked_at <= _STILL_ASKING_S
            for other in self.table.waiting[DECODE].values()
            if other is not leg and other.asked_at is not None
        )

    def _answer(self, granted: bool, reason: str = "") -> HandoffReply:
        return HandoffReply(granted=granted, reason="" if granted else reason)
