"""Prefill legs outside the engine: fetch at once, ask the decode node for room, enter, hand off."""

from dataclasses import dataclass, field
from math import inf

import msgspec

from schemas.serve import Finish, HandoffReply, HandoffVerb, RequestState, ServeRequest
from services.engine.backend import LegKey
from services.engine.core.effects import Ask, CancelInside, Effect, Fetch, FetchGivenUp, Release, Report, Submit, Tell
from services.engine.core.legs import PREFILL, LegTable, QueuedLeg
from services.engine.core.limits import Limits
from services.engine.core.timing import PrefillTerms, PrefillTime, attention_pairs

FULL, UNKNOWN, PHASE, GONE = "full", "unknown", "phase", "gone"
"""Why a reservation was not granted. `gone` is ours: nobody listens on the peer's subject."""


class Asked(msgspec.Struct, frozen=True):
    """A reservation under way; `need_tokens` of device memory here are kept free for its leg."""

    key: LegKey
    peer: str
    room: int
    need_tokens: int
    load_tokens: int


@dataclass(slots=True)
class PrefillQueue:
    """The prefill half of the node's queue. At most `batches_inside` batches are inside the engine or asked for.

    `asks`: reservations under way by number, those of legs that have gone meanwhile included.
    """

    table: LegTable
    limits: Limits
    times: PrefillTime
    rendezvous: str
    asks: dict[int, Asked] = field(default_factory=dict)
    last_number: int = 0

    def begin(self, leg: QueuedLeg) -> list[Effect]:
        """The prompt is here: fetch its prefix now, so that it travels while the leg waits."""
        leg.prompt_here = True
        if self.limits.usable_blocks(leg.request.prompt_tokens) == 0:
            return self._ready(leg, 0)
        return [*self._fetch(leg), self._report(leg, RequestState.FETCHING)]

    def fetched(self, fetch_id: str, blocks: int) -> list[Effect]:
        """A fetch has ended with `blocks` leading blocks pinned; one given up meanwhile is released once more."""
        key = self.table.pins.get(fetch_id)
        if key is None:
            return [Release(fetch_id)]
        leg = self.table.waiting[PREFILL].get(key)
        if leg is None or leg.state is not RequestState.FETCHING:
            return []
        return self._ready(leg, blocks)

    def redirect(self, leg: QueuedLeg, request: ServeRequest) -> list[Effect]:
        """Another decode node or transfer id for a leg that still waits; a grant under way will be taken back."""
        effects = self._take_back(leg, "redirected")
        leg.request = request
        leg.ask = 0
        leg.refusals = 0
        leg.next_ask_at = 0.0
        leg.stranger_since = None
        return effects

    def stop(self, leg: QueuedLeg, finish: Finish, reason: str, now: float, *, peer_lives: bool = True) -> list[Effect]:
        """End a leg for a reason of our own: at once if it is outside the engine, else through the engine."""
        if leg.key in self.table.inside[PREFILL]:
            if leg.ending is not None:
                return []
            leg.ending = (finish, reason)
            return [CancelInside(leg.key), *([self.abort(leg, reason)] if peer_lives else [])]
        told = self._take_back(leg, reason) if leg.token is None else [self.abort(leg, reason)]
        return [*(told if peer_lives else []), *self.table.end(leg, finish, reason, now)]

    def admit(self, now: float, room_tokens: int) -> list[Effect]:
        """Ask for reservations in queue order, as far as the engine has room for one batch more than runs.

        Device room is kept strictly in order; a leg whose fetch or decode node is not ready lets others pass.
        """
        effects: list[Effect] = []
        limits, count = self.limits, self._count_inside()
        batches = limits.batches_inside * limits.batch_tokens - self.table.load_inside
        room, fetching = room_tokens, RequestState.FETCHING
        for ask in self.asks.values():
            batches, room = batches - ask.load_tokens, room - ask.need_tokens
        refused: dict[str, int] = {}
        for _, _, leg in self.table.lines[PREFILL]:
            if leg.ask or not leg.prompt_here:
                continue
            load = leg.load_tokens
            if load > batches or leg.need_tokens > room or count >= limits.max_running:
                break
            peer = leg.request.peer
            if leg.state is fetching:
                effects += self._wait_for_fetch(leg, now)
            elif leg.next_ask_at > now:
                if leg.refusals:
                    refused[peer] = refused.get(peer, 0) + 1
            elif leg.refusals or refused.get(peer, 0) < limits.look_ahead:
                batches, room, count = batches - load, room - leg.need_tokens, count + 1
                effects.append(self._ask(leg, load))
        return effects

    def answered(self, number: int, reply: HandoffReply | None, now: float) -> list[Effect]:
        """The decode node's answer to an `Ask`; None: it did not answer in time, so it may have granted."""
        asked = self.asks.pop(number)
        leg = self.table.waiting[PREFILL].get(asked.key)
        if leg is None or leg.ask != number:
            if reply is None or reply.granted:
                return [Tell(HandoffVerb.ABORT, asked.key, asked.peer, asked.room, reason="not wanted any more")]
            return []
        leg.ask = 0
        leg.maybe_granted = reply is None
        if reply is not None and reply.granted:
            self.table.enter(leg)
            rendezvous = self.rendezvous
            return [self._report(leg, RequestState.RESERVED), Submit(leg.key, rendezvous, leg.restorable_blocks)]
        return self._refused(leg, FULL if reply is None else reply.reason, now)

    def first_token(self, leg: QueuedLeg, token: int) -> list[Effect]:
        """The engine has sampled the first token of a leg inside: the decode node may start."""
        leg.token = token
        return [Tell(HandoffVerb.DONE, leg.key, leg.peer, leg.request.room, token=token)]

    def told(self, leg: QueuedLeg, lost: str, now: float) -> list[Effect]:
        """The decode node has confirmed the hand-off (`lost` empty), or it will not."""
        leg.told = not lost
        leg.lost_peer = lost
        if leg.key not in self.table.closing:
            return []
        finish, reason = leg.ending or (Finish.HANDED_OFF, "")
        return self._closed(leg, finish, reason, now)

    def left(self, leg: QueuedLeg, finish: Finish, reason: str, now: float) -> list[Effect]:
        """The leg has left the engine."""
        if leg.ending is None and leg.token is not None and finish in (Finish.HANDED_OFF, Finish.STOP, Finish.LENGTH):
            if leg.told is None:
                leg.ending = (finish, reason)
                self.table.close(leg)
                return self.table.unpin(leg)
            return self._closed(leg, finish, reason, now)
        stopped = leg.ending is not None
        finish, reason = leg.ending or (finish, reason)
        effects = self.table.end(leg, finish, reason, now)
        return effects if stopped else [self.abort(leg, reason or finish), *effects]

    def _take_back(self, leg: QueuedLeg, reason: str) -> list[Effect]:
        """Take a reservation back that an unanswered `Ask` may have left at the peer."""
        if not leg.maybe_granted:
            return []
        leg.maybe_granted = False
        return [self.abort(leg, reason)]

    def abort(self, leg: QueuedLeg, reason: str) -> Effect:
        """What the decode node is told about a leg that will not be handed off."""
        return Tell(HandoffVerb.ABORT, leg.key, leg.peer, leg.request.room, reason=reason)

    def kept_tokens(self, but: LegKey | None = None) -> int:
        """Device room kept for legs whose reservation is under way, without that of `but`."""
        return sum([asked.need_tokens for asked in self.asks.values() if asked.key != but]) if self.asks else 0

    def next_due(self, now: float) -> float | None:
        """When a waiting leg next needs a look, though nothing happens to it; None if none waits."""
        first = inf
        for leg in self.table.waiting[PREFILL].values():
            if now < leg.next_ask_at < first:
                first = leg.next_ask_at
            if leg.head_since is not None and now < (at := leg.head_since + self.patience_s(leg)) < first:
                first = at
        return first if first < inf else None

    def predicted_s(self, request: ServeRequest) -> float:
        """How long this prefill will take, by the router's plan of what need not be computed."""
        cached = min(request.cached_tokens, request.prompt_tokens - 1)
        uncached = request.prompt_tokens - cached
        return self.times.prefill_s(PrefillTerms(1, uncached, attention_pairs(uncached, cached)))

    def patience_s(self, leg: QueuedLeg) -> float:
        """How long a leg at the head waits for its fetch: what computing the missing tokens would take, and a little.

        Missing is what other nodes are to send; once that is given up, all that is planned to be reused.
        """
        size = self.limits.block_size
        sources = [source for source in leg.request.fetch if source.node != self.limits.node]
        if leg.only_own or not sources:
            first, blocks = 0, max((source.last for source in leg.request.fetch), default=0)
            tokens = max(leg.request.cached_tokens, blocks * size)
        else:
            first = min(source.first for source in sources)
            tokens = sum(max(0, source.last - source.first) for source in sources) * size
        tokens = min(max(tokens, size), leg.request.prompt_tokens)
        pairs = attention_pairs(tokens, first * size)
        return self.limits.fetch_grace_s + self.times.prefill_s(PrefillTerms(1, tokens, pairs))

    def check(self) -> None:
        for leg in self.table.waiting[PREFILL].values():
            assert leg.ask == 0 or self.asks[leg.ask].key == leg.key, leg
        load = self.table.load_inside + self._load_asked()
        assert load <= self.limits.batches_inside * self.limits.batch_tokens, load
        assert self._count_inside() <= self.limits.max_running, self._count_inside()

    def _fetch(self, leg: QueuedLeg) -> list[Effect]:
        self.last_number += 1
        fetch_id = f"{leg.key.id}/{leg.key.attempt}/{self.last_number}"
        self.table.pin(leg, fetch_id)
        leg.state = RequestState.FETCHING
        leg.head_since = None
        return [Fetch(leg.key, fetch_id, () if leg.only_own else tuple(leg.request.fetch))]

    def _ready(self, leg: QueuedLeg, blocks: int) -> list[Effect]:
        leg.state = RequestState.READY
        leg.head_since = None
        leg.restorable(min(blocks, self.limits.usable_blocks(leg.request.prompt_tokens)), self.limits)
        return [self._report(leg, RequestState.READY)]

    def _wait_for_fetch(self, leg: QueuedLeg, now: float) -> list[Effect]:
        """Only its fetch keeps this leg from the engine: give it as long as computing would take, then do without.

        First the fetch is given up and what is here is pinned; if even that is not answered, nothing is reused.
        """
        if leg.head_since is None:
            leg.head_since = now
        waited_s = now - leg.head_since
        if waited_s < self.patience_s(leg):
            return []
        effects = [*self.table.unpin(leg), FetchGivenUp(leg.key, waited_s)]
        if leg.only_own:
            return effects + self._ready(leg, 0)
        leg.only_own = True
        return effects + self._fetch(leg)

    def _ask(self, leg: QueuedLeg, load_tokens: int) -> Effect:
        self.last_number += 1
        leg.ask = self.last_number
        self.asks[leg.ask] = Asked(leg.key, leg.peer, leg.request.room, leg.need_tokens, load_tokens)
        return Ask(leg.ask, leg.key, leg.peer, leg.request.room)

    def _refused(self, leg: QueuedLeg, reason: str, now: float) -> list[Effect]:
        """Not granted: ask again later, and give the leg back when the peer does not know it for too long."""
        leg.refusals += 1
        wait_s = min(self.limits.retry_s * 2 ** min(leg.refusals - 1, 10), self.limits.longest_retry_s)
        leg.next_ask_at = now + wait_s
        if reason == FULL:
            leg.stranger_since = None
            return []
        if leg.stranger_since is None:
            leg.stranger_since = now
        if reason == GONE or now - leg.stranger_since >= self.limits.stranger_s:
            return self.table.end(leg, Finish.REQUEUED, f"peer {leg.peer}: {reason}", now)
        return []

    def _closed(self, leg: QueuedLeg, finish: Finish, reason: str, now: float) -> list[Effect]:
        if leg.lost_peer:
            return self.table.end(leg, Finish.ERROR, f"peer {leg.peer}: {leg.lost_peer}", now)
        return self.table.end(leg, finish, reason, now)

    def _report(self, leg: QueuedLeg, state: RequestState) -> Effect:
        return Report(leg.key, leg.request.router, state=state)

    def _load_asked(self) -> int:
        return sum([asked.load_tokens for asked in self.asks.values()])

    def _count_inside(self) -> int:
        return len(self.table.inside[PREFILL]) + len(self.asks)
