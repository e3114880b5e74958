"""The queue of a node: every leg from its arrival to its end, for both phases and any engine.

    prefill leg   queued -> fetching -> ready -> reserved -> prefilling -> transferring -> ended
    decode leg    queued (held) ------------> reserved -> transferring -> decoding ------> ended

Both legs of a request arrive together. The prefill leg fetches its prefix at once; when the engine has room it asks the
decode node, whose leg enters that engine on the grant, and only then enters its own. Data and `now` (monotonic seconds)
in, effects out. The room of an engine is given by the caller, everything submitted so far subtracted.
"""

from dataclasses import dataclass, field

import msgspec

from schemas.phase import Phase, PhaseCommand
from schemas.serve import (
    CancelReply,
    Finish,
    Handoff,
    HandoffReply,
    HandoffVerb,
    RequestState,
    ServeReply,
    ServeRequest,
)
from services.engine.backend import LegKey
from services.engine.core.decode import Answer, DecodeHold
from services.engine.core.effects import Effect, ReadPrompt, Report
from services.engine.core.legs import DECODE, PHASES, PREFILL, LegTable, QueuedLeg
from services.engine.core.limits import Limits
from services.engine.core.liveness import RESTARTED, Liveness
from services.engine.core.prefill import PHASE, PrefillQueue
from services.engine.core.switching import PhaseSwitch
from services.engine.core.timing import PrefillTime

ServeAnswer = tuple[ServeReply, list[Effect]]


@dataclass(frozen=True, slots=True)
class Counts:
    """What the heartbeat says about the queue."""

    waiting: int
    running_prefill: int
    running_decode: int


@dataclass(slots=True)
class Queueing:
    """The state of one node's queue. Make one with `Queueing.of`."""

    limits: Limits
    table: LegTable
    prefill: PrefillQueue
    decode: DecodeHold
    switch: PhaseSwitch
    routers: Liveness
    nodes: Liveness
    draining: bool = False
    last_number: int = 0
    swept_at: float = field(default=float("-inf"))

    @classmethod
    def of(cls, limits: Limits, times: PrefillTime, rendezvous: str = "", phase: Phase = Phase.BOTH) -> "Queueing":
        """An empty queue of a node that runs `phase` under epoch 0."""
        table = LegTable(limits)
        return cls(
            limits,
            table,
            PrefillQueue(table, limits, times, rendezvous),
            DecodeHold(table, limits),
            PhaseSwitch(phase),
            Liveness(limits.router_timeout_s),
            Liveness(limits.node_timeout_s),
        )

    # From the router

    def serve(self, request: ServeRequest, now: float) -> ServeAnswer:
        """Take a leg, or redirect one that waits, or say why not. The same leg again changes nothing."""
        key = LegKey(request.id, request.attempt, request.phase)
        leg = self.table.find(key)
        if leg is not None:
            return self._again(leg, request)
        if key in self.table.ended:
            return ServeReply(accepted=True, epoch=self.switch.epoch), []
        refusal = self._refusal(key, request)
        if refusal is not None:
            return refusal, []
        effects = self._supersede(request, now)
        self.last_number += 1
        load, order_at = min(request.prompt_tokens, self.limits.batch_tokens), self._order_at(request, now)
        leg = QueuedLeg(key, request, self.last_number, now, self._need_tokens(request), load, order_at)
        position = self.table.position(leg)
        self.table.add(leg)
        self.routers.expect(request.router, now)
        if request.peer != self.limits.node:
            self.nodes.expect(request.peer, now)
        effects.append(Report(key, request.router, state=RequestState.QUEUED))
        effects += self._begin(leg) if request.tokens else [ReadPrompt(key)]
        return ServeReply(accepted=True, epoch=self.switch.epoch, position=position), effects

    def cancel(self, id: str, attempt: int, phase: Phase | None, now: float) -> tuple[CancelReply, list[Effect]]:  # noqa: A002
        """End the legs of this attempt, whatever they are doing. One that comes after its cancel is refused."""
        effects: list[Effect] = []
        known = False
        for each in PHASES if phase is None else (phase,):
            key = LegKey(id, attempt, each)
            leg = self.table.find(key)
            if leg is not None:
                known = True
                effects += self._stop(leg, Finish.CANCELLED, "cancelled", now)
            elif key not in self.table.ended:
                self.table.refused[key] = now + self.limits.keep_s
        return CancelReply(known=known), effects

    def prompt_read(self, key: LegKey) -> list[Effect]:
        """The prompt of a leg has arrived from its router."""
        leg = self.table.waiting[key.phase].get(key)
        return [] if leg is None or leg.prompt_here else self._begin(leg)

    def prompt_lost(self, key: LegKey, reason: str, now: float) -> list[Effect]:
        """The prompt cannot be had: the router places the request again, or knows that it is gone."""
        leg = self.table.waiting[key.phase].get(key)
        return [] if leg is None else self._stop(leg, Finish.REQUEUED, reason, now)

    # From the own pool and the peer

    def fetched(self, fetch_id: str, blocks: int) -> list[Effect]:
        """A fetch ended with `blocks` leading blocks here and pinned."""
        return self.prefill.fetched(fetch_id, blocks)

    def answered(self, number: int, reply: HandoffReply | None, now: float) -> list[Effect]:
        """The answer to an `Ask`, None if there was none in time."""
        key = self.prefill.asks[number].key
        return self._after(key, self.prefill.answered(number, reply, now), now)

    def told(self, key: LegKey, lost: str, now: float) -> list[Effect]:
        """The answer to a `Tell` of a finished prefill; `lost` says why the decode node has not taken it."""
        leg = self.table.find(key)
        if leg is None:
            return []
        return self._after(key, self.prefill.told(leg, lost, now), now)

    def handoff(self, message: Handoff, now: float, room_tokens: int) -> Answer:
        """What another node (or this one) says about a request whose prefill it runs; `room_tokens` for decode."""
        if message.verb is HandoffVerb.RESERVE:
            if not self.switch.phase.serves(DECODE):
                return HandoffReply(granted=False, reason=PHASE), []
            return self.decode.reserve(message, now, room_tokens - self._kept_for_prefill(message))
        if message.verb is HandoffVerb.DONE:
            return self.decode.done(message)
        reply, effects = self.decode.abort(message, now)
        return reply, self._after(LegKey(message.id, message.attempt, DECODE), effects, now)

    # From the engine

    def entered(self, key: LegKey, state: RequestState) -> list[Effect]:
        """The engine says that a leg inside it is now prefilling, transferring or decoding."""
        leg = self.table.inside[key.phase].get(key)
        if leg is None or leg.ending is not None or leg.state is state:
            return []
        leg.state = state
        return [Report(key, leg.request.router, state=state)]

    def first_token(self, key: LegKey, token: int) -> list[Effect]:
        """The engine gave the first token of a prefill leg."""
        leg = self.table.inside[PREFILL].get(key)
        if leg is None or leg.ending is not None or leg.token is not None:
            return []
        return self.prefill.first_token(leg, token)

    def left(
        self, key: LegKey, finish: Finish, reason: str, cached_tokens: int, restored_tokens: int, now: float
    ) -> list[Effect]:
        """A leg has left the engine and holds nothing there."""
        leg = self.table.inside[key.phase][key]
        leg.cached_tokens, leg.restored_tokens = cached_tokens, restored_tokens
        self.switch.ran(key, now)
        half = self.prefill if key.phase is PREFILL else self.decode
        return self._after(key, half.left(leg, finish, reason, now), now)

    # From the planner and the clock

    def command(self, command: PhaseCommand, now: float) -> list[Effect]:
        """Obey a phase command of a new epoch: waiting legs of a phase left behind move, running ones end here."""
        if not self.switch.obey(command, now):
            return []
        effects: list[Effect] = []
        running: set[LegKey] = set()
        moved = 0
        for phase in PHASES:
            if not self.switch.phase.serves(phase):
                moved += len(self.table.waiting[phase])
                effects += self._give_back(phase, f"phase: {command.phase}, epoch {command.epoch}", now)
                running |= self.table.inside[phase].keys()
        if not self.switch.phase.serves(PREFILL):
            running |= self.table.closing.keys()
        return effects + self.switch.begin(moved, running, now)

    def drain(self, now: float) -> list[Effect]:
        """The service is about to stop: take nothing new, give back what waits; what runs goes on."""
        self.draining = True
        return [effect for phase in PHASES for effect in self._give_back(phase, "draining", now)]

    def step(self, now: float, room_tokens: int, *, listening: bool = True) -> list[Effect]:
        """Let in what may enter (`room_tokens` for prefill), give up what waited too long. Cheap; call it often.

        `listening` False: the broker is away, so nobody's silence means anything.
        """
        effects: list[Effect] = []
        if now - self.swept_at >= self.limits.sweep_s:
            self.swept_at = now
            effects += self._sweep(now, listening=listening)
        return effects + self.prefill.admit(now, room_tokens)

    def next_due(self, now: float) -> float:
        """When `step` must be called again at the latest, though nothing happens."""
        sweep = now + (self.limits.sweep_s if any(self.table.waiting.values()) else 5 * self.limits.sweep_s)
        return min(sweep, self.prefill.next_due(now) or sweep)

    def counts(self) -> Counts:
        inside = self.table.inside
        waiting = sum(len(legs) for legs in self.table.waiting.values())
        closing = len(self.table.closing)
        return Counts(waiting, len(inside[PREFILL]) + closing, len(inside[DECODE]))

    def idle(self) -> bool:
        """No leg is here in any state."""
        return not any(True for _ in self.table.all())

    def check(self) -> None:
        """Places, pins, reservations and limits are accounted for."""
        self.table.check()
        self.prefill.check()
        self.decode.check()
        self.switch.check()
        self.routers.check()
        self.nodes.check()
        for phase in PHASES:
            waiting = self.table.waiting[phase].values()
            assert self.switch.phase.serves(phase) or all(leg.request.resume for leg in waiting), (
                f"{phase} legs wait here"
            )
        assert not (self.draining and any(self.table.waiting.values())), "legs wait although the node drains"
        running = {key for phase in PHASES for key in self.table.inside[phase]} | self.table.closing.keys()
        assert self.switch.draining <= running, self.switch.draining - running

    # Inside

    def _again(self, leg: QueuedLeg, request: ServeRequest) -> ServeAnswer:
        """The same leg again: nothing, or another peer or transfer id for one that still waits."""
        same = (leg.request.peer, leg.request.room) == (request.peer, request.room)
        waits = leg.key in self.table.waiting[leg.key.phase]
        epoch = self.switch.epoch
        if not same and not waits:
            text = f"already {leg.state} with peer {leg.peer}"
            return ServeReply(accepted=False, epoch=epoch, reason="late", text=text), []
        effects: list[Effect] = []
        if not same:
            changed = msgspec.structs.replace(leg.request, peer=request.peer, room=request.room)
            if leg.key.phase is PREFILL:
                effects = self.prefill.redirect(leg, changed)
            else:
                self.decode.redirect(leg, changed)
            if request.peer != self.limits.node:
                self.nodes.expect(request.peer, leg.arrived_at)
        position = self.table.position(leg) if waits else 0
        return ServeReply(accepted=True, epoch=epoch, position=position), effects

    def _refusal(self, key: LegKey, request: ServeRequest) -> ServeReply | None:
        """Why this leg is not taken, with the value and its limit; None if it is."""
        cause = self._cause(key, request)
        if cause is None:
            return None
        reason, text = cause
        return ServeReply(accepted=False, epoch=self.switch.epoch, reason=reason, text=text)

    def _cause(self, key: LegKey, request: ServeRequest) -> tuple[str, str] | None:
        limits, serves, newest = self.limits, self.switch.phase, self.table.newest_attempt(key.id, key.phase)
        prompt, output, device = request.prompt_tokens, request.sampling.max_new_tokens, self._need_tokens(request)
        if key.phase is DECODE and request.peer == limits.node and not limits.shared_pair:
            device += limits.rounded(prompt + 1)
        waiting = len(self.table.waiting[key.phase])
        if self.draining:
            return "draining", "the node is stopping"
        if not serves.serves(key.phase) and not self._resumes(request):
            return "phase", f"the node serves {serves}, not {key.phase}"
        if key in self.table.refused:
            return "cancelled", "cancelled before it came"
        if newest > key.attempt:
            return "stale", f"attempt {key.attempt}, but {newest} has already been here"
        if prompt + output > limits.max_context_tokens:
            text = f"{prompt} prompt + {output} new tokens exceed the context of {limits.max_context_tokens}"
            return "context", text
        if device > limits.l1_tokens:
            return "context", f"{device} tokens of KV exceed device memory of {limits.l1_tokens}"
        if waiting >= limits.max_waiting:
            return "full", f"{waiting} legs wait, limit {limits.max_waiting}"
        return None

    def _resumes(self, request: ServeRequest) -> bool:
        """A short prefill of a branch whose KV lies here, whose decode leg comes here too."""
        return request.resume and request.phase is PREFILL and request.peer == self.limits.node

    def _order_at(self, request: ServeRequest, now: float) -> float:
        weight = self.limits.order_weight
        return now + weight * self.prefill.predicted_s(request) if weight and request.phase is PREFILL else now

    def _need_tokens(self, request: ServeRequest) -> int:
        if request.phase is PREFILL:
            return self.limits.rounded(request.prompt_tokens + 1)
        output = min(request.sampling.max_new_tokens, self.limits.reserve_output_tokens)
        return self.limits.rounded(request.prompt_tokens + output)

    def _kept_for_prefill(self, ask: Handoff) -> int:
        """Device room that the own prefill half has asked for; its own leg's share too, unless the pair shares KV."""
        if not self.prefill.asks:
            return 0
        key = LegKey(ask.id, ask.attempt, PREFILL)
        own = ask.node == self.limits.node and self.limits.shared_pair
        return self.prefill.kept_tokens(key if own else None)

    def _supersede(self, request: ServeRequest, now: float) -> list[Effect]:
        """A newer attempt of a request ends the older ones: their cancel may have been lost."""
        return [
            effect
            for leg in self.table.of(request.id, request.phase)
            for effect in self._stop(leg, Finish.CANCELLED, f"attempt {request.attempt} has come", now)
        ]

    def _begin(self, leg: QueuedLeg) -> list[Effect]:
        return (self.prefill if leg.key.phase is PREFILL else self.decode).begin(leg)

    def _stop(
        self, leg: QueuedLeg, finish: Finish, reason: str, now: float, *, peer_lives: bool = True
    ) -> list[Effect]:
        if leg.key.phase is PREFILL:
            effects = self.prefill.stop(leg, finish, reason, now, peer_lives=peer_lives)
        else:
            effects = self.decode.stop(leg, finish, reason, now)
        return self._after(leg.key, effects, now)

    def _give_back(self, phase: Phase, reason: str, now: float) -> list[Effect]:
        legs = self.table.in_order(phase)
        return [effect for leg in legs for effect in self._stop(leg, Finish.REQUEUED, reason, now)]

    def _after(self, key: LegKey, effects: list[Effect], now: float) -> list[Effect]:
        """Add what the end of a leg means for a switch under way."""
        return effects if key not in self.table.ended else [*effects, *self.switch.ended(key, now)]

    def _sweep(self, now: float, *, listening: bool) -> list[Effect]:
        effects = self.table.forget(now)
        lost_routers = self.routers.gone(now, listening=listening)
        lost_nodes = self.nodes.gone(now, listening=listening)
        for leg in list(self.table.all()):
            router, peer = leg.request.router, leg.peer
            if router in lost_routers:
                effects += self._stop(leg, Finish.CANCELLED, f"router {router} {lost_routers[router]}", now)
            elif peer in lost_nodes and self._needs_peer(leg, lost_nodes[peer]):
                finish = Finish.REQUEUED if leg.token is None else Finish.ERROR
                effects += self._stop(leg, finish, f"peer {peer} {lost_nodes[peer]}", now, peer_lives=False)
            elif leg.deadline_at <= now and leg.key in self.table.waiting[leg.key.phase]:
                reason = f"deadline: not begun within {leg.request.deadline_s:g} s"
                effects += self._stop(leg, Finish.REQUEUED, reason, now)
        legs = list(self.table.all())
        self.routers.keep({leg.request.router for leg in legs}, now)
        self.nodes.keep({leg.peer for leg in legs}, now)
        return effects

    def _needs_peer(self, leg: QueuedLeg, lost: str) -> bool:
        """Whether the loss of its other leg's node ends this leg: not once its KV is all here.

        A node that has started anew is asked again by what waits: those legs may be meant for its new life.
        """
        if lost == RESTARTED and leg.key in self.table.waiting[leg.key.phase]:
            return False
        return leg.key.phase is PREFILL or leg.state in (
            RequestState.QUEUED,
            RequestState.RESERVED,
            RequestState.TRANSFERRING,
        )
