"""The life of one request, from its arrival to its one end. Events in, effects out.

    received -> matched -> placed -> queued .. transferring -> decoding -> ended
        ^                                         |
        +--- another attempt: new room, the failed node avoided, prompt and the tokens so far

A leg is named by (attempt, phase, node); news of any other leg changes nothing. No two attempts share a room.
"""

from dataclasses import replace

from schemas.directory import MatchReply
from schemas.phase import Phase
from schemas.serve import Finish, LegUpdate, RequestState, ServeReply
from services.router.core.answer import Answer
from services.router.core.closing import closing
from services.router.core.effects import (
    AskAgain,
    AskDirectory,
    CancelLeg,
    Effect,
    EmitTokens,
    Outcome,
    Place,
    PlaceDecode,
)
from services.router.core.failure import Failure, invalid, unavailable
from services.router.core.leg import Leg
from services.router.core.load import Booking
from services.router.core.prefix import reusable_blocks
from services.router.core.sending import placed_effect, send_leg
from services.router.core.spec import Finished, Places, Spec, Times

MAX_FAILURES = 3
PATIENCE_S = 10.0
"""How long a request that was given back or lost its node waits for another one."""
FINISH_GRACE_S = 1.0
"""How long the prefill leg's last word is waited for: it says what was cached, or why the decode leg was cancelled."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_ORDER = {state: index for index, state in enumerate(RequestState)}
NO_MATCH = MatchReply(blocks=0, blind=True)


class Request:
    """One request's state. `changed` is set whenever its bookings may differ; the owner clears it.

    `look_at`: before that moment `tick` has nothing to do; the owner keeps it, by `growth.calm_until`.
    """

    def __init__(self, spec: Spec, now: float) -> None:
        self.spec = spec
        self.state = RequestState.RECEIVED
        self.attempt, self.failures, self.moves = 1, 0, 0
        self.avoided: set[str] = set()
        self.tried_decode: set[str] = set()
        self.legs: dict[Phase, Leg] = {}
        self.answer = Answer(spec.sampling.max_new_tokens)
        self.base = 0
        self.context = spec.context
        self.match = self.first_match = NO_MATCH
        self.places: Places | None = None
        self.finished: Finished | None = None
        self.outcome: Outcome | None = None
        self.cached_tokens: int | None = None
        self.known_tokens = 0
        self.restored_tokens = 0
        self.times = Times(now)
        self.changed = False
        self.look_at = now
        self.wake_at: float | None = None
        self.stuck_since: float | None = None
        self._asked_at = now

    @property
    def id(self) -> str:
        return self.spec.id

    @property
    def ended(self) -> bool:
        return self.outcome is not None

    # -- events ---------------------------------------------------------------------------------------------------

    def start(self) -> list[Effect]:
        """A new request: where does its prefix lie?"""
        return [AskDirectory(self.id, self.attempt, self.context)]

    def matched(self, attempt: int, match: MatchReply | None) -> list[Effect]:
        """The directory's answer to this attempt, None when it kept silent."""
        if self.ended or attempt != self.attempt or self.state is not RequestState.RECEIVED or self.wake_at is not None:
            return []
        self.match, self.state = match or NO_MATCH, RequestState.MATCHED
        if not self.base:
            self.first_match = self.match
            size = self.context.scheme.block_size
            self.known_tokens = min(self.match.known_blocks, reusable_blocks(self.context.tokens, size)) * size
        return [Place(self.id)]

    def held(self) -> None:
        """It waits for what another request computes; the directory's next answer places it."""
        self.state = RequestState.RECEIVED

    def placed(self, places: Places, now: float) -> list[Effect]:
        """Nodes were chosen: both legs go out, the decode leg first, so that the other finds it there."""
        prefill, decode = places.prefill.node, places.decode_node
        self.places, self.state = places, RequestState.PLACED
        if self.times.first_token is None:
            self.times.placed = now
        if self.times.predicted_ttft_s is None:
            self.times.predicted_ttft_s = places.prefill.ttft_s
        self.tried_decode = {decode}
        self.legs = {
            Phase.DECODE: Leg(Phase.DECODE, decode, prefill, places.room, now),
            Phase.PREFILL: Leg(Phase.PREFILL, prefill, decode, places.room, now),
        }
        self.changed = True
        return [placed_effect(self, self.places), *(send_leg(self, places, leg) for leg in self.legs.values())]

    def unplaced(self, failure: Failure, now: float) -> list[Effect]:
        """No node takes it: a new request fails, one that was under way waits for a node."""
        if self.stuck_since is None or now - self.stuck_since > PATIENCE_S:
            return self._fail(failure, now)
        self.state = RequestState.RECEIVED
        self._pause(now)
        return []

    def redirected(self, node: str, room: int, now: float) -> list[Effect]:
        """Another decode node, same attempt: the new leg goes out, then the prefill leg learns its new peer."""
        assert self.places is not None
        prefill = self.legs[Phase.PREFILL]
        prefill.peer, prefill.room = node, room
        self.places = replace(self.places, decode_node=node, room=room)
        self.tried_decode.add(node)
        self.legs[Phase.DECODE] = Leg(Phase.DECODE, node, prefill.node, room, now)
        self.changed = True
        return [
            placed_effect(self, self.places),
            send_leg(self, self.places, self.legs[Phase.DECODE]),
            send_leg(self, self.places, prefill),
        ]

    def unredirected(self, now: float) -> list[Effect]:
        """No other decode node: a new attempt as a whole."""
        return self._again(None, "no other decode node", now, counts=False)

    def answered(self, phase: Phase, node: str, attempt: int, reply: ServeReply | None, now: float) -> list[Effect]:
        """The node's answer to a leg sent, None when it kept silent (and sent no news of the leg either)."""
        leg = self._leg(phase, node, attempt)
        if leg is None:
            return self.late_answer(self.id, phase, node, attempt, reply)
        leg.heard = now
        if reply is None and (leg.accepted or leg.state is not None):
            return []
        if reply is None:
            return self._leg_failed(leg, f"{node} did not answer", now)
        if reply.accepted:
            leg.accepted = True
            if all(other.accepted for other in self.legs.values()):
                self.stuck_since = None
            return []
        if reply.reason == "context":
            text = reply.text or f"{node} cannot hold {self.context.tokens} tokens"
            return self._fail(invalid(text, "messages", "context_length_exceeded"), now)
        return self._leg_failed(leg, f"{node} refused: {reply.reason} {reply.text}".rstrip(), now, counts=False)

    @staticmethod
    def late_answer(request: str, phase: Phase, node: str, attempt: int, reply: ServeReply | None) -> list[Effect]:
        """An answer nobody waits for any more: unless the leg was refused, it may be held there, so it is cancelled."""
        refused = reply is not None and not reply.accepted
        return [] if refused else [CancelLeg(request, attempt, node, phase)]

    def updated(self, node: str, update: LegUpdate, now: float) -> list[Effect]:
        """News of a leg from its node: state, tokens, end."""
        leg = self._leg(update.phase, node, update.attempt)
        if leg is None:
            return []
        leg.heard = now
        if update.phase is Phase.PREFILL and update.cached_tokens is not None and not self.base:
            self.cached_tokens = update.cached_tokens
            self.restored_tokens = update.restored_tokens or 0
        if update.state is not None and update.state is not RequestState.ENDED and leg.open:
            self._advance(leg, update.state, now)
        effects = self._take(leg, update, now) if update.tokens else []
        if update.finish is not None and leg.open:
            effects += self._leg_finished(leg, update, now)
        return effects + self._settle(now)

    def leg_unknown(self, phase: Phase, node: str, attempt: int, now: float) -> list[Effect]:
        """The node says it has no such leg (any more): its end was lost, or it never began."""
        leg = self._leg(phase, node, attempt)
        if leg is None:
            return []
        return self._leg_failed(leg, f"{node} lost it", now)

    def node_lost(self, node: str, now: float) -> list[Effect]:
        """A node is gone, and with it whatever it had of this request."""
        prefill, decode = self.legs.get(Phase.PREFILL), self.legs.get(Phase.DECODE)
        if prefill is None or decode is None:
            return []
        why = f"{node} was lost"
        if decode.node == node and (decode.open or self.answer.gap):
            waits_elsewhere = prefill.waiting and prefill.node != node
            return self._leg_failed(decode, why, now) if waits_elsewhere else self._again(node, why, now)
        needed = prefill.open or decode.state is not RequestState.DECODING
        return self._again(node, why, now) if prefill.node == node and needed and not self.finished else []

    def failed(self, failure: Failure, now: float) -> list[Effect]:
        """Something else than its nodes stands in its way, for good."""
        return self._fail(failure, now)

    def cancelled(self, now: float) -> list[Effect]:
        """The client is gone, or says so."""
        return self._end(Outcome.CANCELLED, now, Failure(499, "cancelled", "the client went away"))

    def stopped(self, now: float) -> list[Effect]:
        """The text has what stops it: the answer is complete, the engine need not go on."""
        return self._end(Outcome.STOP, now)

    def tick(self, now: float) -> list[Effect]:
        """Time went by: go on after a pause, end without the prefill leg's last word, ask for silent legs."""
        if self.ended:
            return []
        if self.wake_at is not None and now >= self.wake_at:
            self.wake_at = None
            return [AskDirectory(self.id, self.attempt, self.context)]
        if now - self.times.arrived > self.spec.timeout_s:
            text = f"no complete answer within {self.spec.timeout_s:g} s"
            return self._fail(unavailable(text, "timeout"), now)
        effects = self._settle(now)
        decode = self.legs.get(Phase.DECODE)
        if decode is not None and decode.finish is Finish.CANCELLED and now - decode.ended_at > FINISH_GRACE_S:
            return self._leg_failed(decode, f"{decode.node} cancelled it", now)
        if decode is not None and decode.missed(self.legs[Phase.PREFILL], now):
            return self._leg_failed(decode, f"{decode.node} was handed nothing", now)
        if self.ended or now - self._asked_at < FINISH_GRACE_S:
            return effects
        silent = [
            leg for leg in self.legs.values() if leg.silent(now) or (leg.phase is Phase.DECODE and self.answer.gap)
        ]
        if silent:
            self._asked_at = now
        return effects + [self._ask_again(leg) for leg in silent]

    # -- what follows from them -------------------------------------------------------------------------------------

    def bookings(self) -> list[Booking]:
        """What this request holds where, one booking per open leg."""
        if self.places is None:
            return []
        service_s, tokens, placed = self.places.prefill.service_s, self.places.decode_tokens, self.times.placed or 0.0
        return [
            Booking(leg.phase, leg.node, service_s if leg.phase is Phase.PREFILL else 0.0, tokens, leg.started, placed)
            for leg in self.legs.values()
            if leg.open
        ]

    def _advance(self, leg: Leg, state: RequestState, now: float) -> None:
        leg.state = state
        if _ORDER[state] > _ORDER[self.state]:
            self.state = state
        if leg.phase is not Phase.PREFILL:
            return
        if state is RequestState.READY:
            self.times.fetched = now
        if state is RequestState.PREFILLING and leg.started is None:
            leg.started = self.times.prefill_started = now
            self.changed = True

    def _take(self, leg: Leg, update: LegUpdate, now: float) -> list[Effect]:
        fresh = self.answer.take(self.base + update.seq, update.tokens)
        if fresh:
            self.stuck_since = None
            if self.times.first_token is None:
                self.times.first_token = now
            return [EmitTokens(self.id, fresh)]
        if self.answer.gap and now - self._asked_at > _FIRST_PAUSE_S:
            self._asked_at = now
            return [self._ask_again(leg)]
        return []

    def _leg_finished(self, leg: Leg, update: LegUpdate, now: float) -> list[Effect]:
        finish = update.finish
        if finish in (Finish.STOP, Finish.LENGTH):
            count = len(update.tokens) // 4
            last = self.base + update.seq + count if count or update.seq else len(self.answer)
            self.answer.ends_at(last)
            outcome = Outcome.STOP if finish is Finish.STOP else Outcome.LENGTH
            self.finished = Finished(outcome, now, trimmed=update.stop_token is not None)
        elif finish is Finish.CANCELLED and leg.phase is Phase.DECODE and self.legs[Phase.PREFILL].open:
            leg.finish, leg.ended_at, self.changed = finish, now, True
            return []
        elif finish is Finish.REQUEUED:
            return self._leg_failed(leg, f"{leg.node} gave it back", now, counts=False)
        elif finish is not Finish.HANDED_OFF:
            return self._leg_failed(leg, f"{leg.node}: {update.reason or finish}", now)
        elif self.legs[Phase.DECODE].finish is Finish.CANCELLED:
            return self._leg_failed(leg, f"{self.legs[Phase.DECODE].node} gave up the hand-off", now)
        leg.finish, leg.ended_at, self.changed = finish, now, True
        return []

    def _settle(self, now: float) -> list[Effect]:
        """End when the answer is complete and the prefill leg has said its last word, or had its time to."""
        if self.ended or self.finished is None or not self.answer.complete:
            return []
        prefill = self.legs.get(Phase.PREFILL)
        if prefill is not None and prefill.open and now - self.finished.at < FINISH_GRACE_S:
            return []
        return self._end(self.finished.outcome, now)

    def _leg_failed(self, leg: Leg, why: str, now: float, *, counts: bool = True) -> list[Effect]:
        """A leg ended without its work done: move the decode leg alone while that is possible, else try all again."""
        prefill = self.legs[Phase.PREFILL]
        if leg.phase is Phase.DECODE and prefill.waiting:
            self.failures += counts
            if self.failures < MAX_FAILURES:
                leg.finish, self.changed = Finish.ERROR, True
                return [CancelLeg(self.id, self.attempt, leg.node, leg.phase), PlaceDecode(self.id)]
            counts = False
        return self._again(leg.node, why, now, counts=counts)

    def _again(self, node: str | None, why: str, now: float, *, counts: bool = True) -> list[Effect]:
        """Another attempt from the tokens so far, or the end when nothing is left to do or to try."""
        self.failures += counts
        self.moves += not counts
        done = self._nothing_left(now)
        if done is not None:
            return self._end(done, now)
        self.stuck_since = now if self.stuck_since is None else self.stuck_since
        if self.failures >= MAX_FAILURES or now - self.stuck_since > PATIENCE_S:
            text = f"{self.attempt} attempts failed, the last because {why}"
            return self._fail(unavailable(text, "attempts_exhausted"), now)
        effects = self._cancel_legs()
        repeated = node is None or node in self.avoided
        if node is not None:
            self.avoided.add(node)
        self._restart()
        if repeated:
            self._pause(now)
            return effects
        return [*effects, AskDirectory(self.id, self.attempt, self.context)]

    def _nothing_left(self, now: float) -> Outcome | None:
        sampling, tokens = self.spec.sampling, self.answer.tokens
        if tokens and tokens[-1] in sampling.stop_token_ids and not sampling.ignore_eos:
            self.finished = Finished(Outcome.STOP, now, trimmed=True)
            return Outcome.STOP
        return Outcome.LENGTH if len(tokens) >= sampling.max_new_tokens else None

    def _restart(self) -> None:
        self.attempt += 1
        self.legs, self.finished, self.changed = {}, None, True
        self.state, self.wake_at = RequestState.RECEIVED, None
        self.answer.reopen()
        if self.base != len(self.answer):
            self.base = len(self.answer)
            self.context = self.spec.context.extended(self.answer.tokens)

    def _pause(self, now: float) -> None:
        self.wake_at = now + min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (self.failures + self.moves))

    def _fail(self, failure: Failure, now: float) -> list[Effect]:
        return self._end(Outcome.REJECTED if self.places is None else Outcome.FAILED, now, failure)

    def _end(self, outcome: Outcome, now: float, failure: Failure | None = None) -> list[Effect]:
        if self.ended:
            return []
        effects = self._cancel_legs()
        self.outcome = outcome
        self.state, self.legs, self.changed = RequestState.ENDED, {}, True
        return effects + closing(self, outcome, failure, now)

    def _cancel_legs(self) -> list[Effect]:
        return [CancelLeg(self.id, self.attempt, leg.node, leg.phase) for leg in self.legs.values() if leg.open]

    def _leg(self, phase: Phase, node: str, attempt: int) -> Leg | None:
        leg = self.legs.get(phase)
        if leg is None or attempt != self.attempt or leg.node != node:
            return None
        return leg if leg.open or (phase is Phase.DECODE and self.answer.gap) else None

    def _ask_again(self, leg: Leg) -> AskAgain:
        return AskAgain(self.id, self.attempt, leg.phase, leg.node, len(self.answer) - self.base)

    @property
    def branch(self) -> tuple[str | None, int | None]:
        """(branch, version): the harness's word before the directory's."""
        identity = self.spec.identity
        version = identity.version if identity.version is not None else self.match.version
        return identity.branch or self.match.branch, version

    def check(self) -> None:
        """An ended request has no legs; an open one has both or none; the answer is whole."""
        self.answer.check()
        assert self.ended == (self.state is RequestState.ENDED)
        assert not (self.ended and self.legs)
        assert len(self.legs) in (0, 2)
        assert self.failures < MAX_FAILURES or self.ended
        assert len(self.answer) <= self.spec.sampling.max_new_tokens
