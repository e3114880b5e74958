"""The legs of a node and where each of them is: waiting, inside the engine, or closing."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from schemas.phase import Phase
from schemas.serve import Finish, RequestState, ServeRequest
from services.engine.backend import LegKey
from services.engine.core.effects import Effect, Forget, Release, Report
from services.engine.core.limits import Limits

PREFILL, DECODE = PHASES = Phase.PREFILL, Phase.DECODE


@dataclass(slots=True)
class QueuedLeg:
    """One leg and all that the node knows about it.

    `need_tokens`: device KV it takes when it enters. `load_tokens`: what its prefill will compute, at most a batch;
    `restorable_blocks` need not be. `fetch_id`: the fetch or pin held in the own pool, None without.
    `head_since`: since when only its fetch keeps it from the engine. `ask`: number of the reservation asked for and not
    yet answered, 0 without; `maybe_granted`: the last one was never answered. `token`: the first token. `told`: whether
    the decode node has confirmed the hand-off. `ending`: how the leg will end once it has left the engine.
    `asked_at`, `last_asked_at` (decode): first and last refusal for want of room. `order_at`: its place in the queue.
    """

    key: LegKey
    request: ServeRequest
    number: int
    arrived_at: float
    need_tokens: int
    load_tokens: int
    order_at: float
    state: RequestState = RequestState.QUEUED
    prompt_here: bool = False
    fetch_id: str | None = None
    only_own: bool = False
    restorable_blocks: int = 0
    head_since: float | None = None
    ask: int = 0
    maybe_granted: bool = False
    refusals: int = 0
    next_ask_at: float = 0.0
    stranger_since: float | None = None
    asked_at: float | None = None
    last_asked_at: float = 0.0
    token: int | None = None
    told: bool | None = None
    lost_peer: str = ""
    ending: tuple[Finish, str] | None = None
    cached_tokens: int | None = None
    restored_tokens: int | None = None

    @property
    def peer(self) -> str:
        return self.request.peer

    @property
    def deadline_at(self) -> float:
        return self.arrived_at + self.request.deadline_s

    def restorable(self, blocks: int, limits: Limits) -> None:
        """So many leading blocks need not be computed, as far as is known now."""
        self.restorable_blocks = blocks
        self.load_tokens = min(self.request.prompt_tokens - blocks * limits.block_size, limits.batch_tokens)


def queue_order(leg: QueuedLeg) -> tuple[float, int]:
    """The one place that says which waiting leg of a phase goes first: the one whose arrival plus a multiple of its
    predicted time is earliest, so that short ones pass long ones, and nobody by more than that multiple."""
    return (leg.order_at, leg.number)


@dataclass(slots=True)
class LegTable:
    """Every leg of the node, in exactly one of `waiting`, `inside` and `closing`; ended ones by key for a while.

    `closing` holds prefill legs that have left the engine while the decode node has not yet confirmed the hand-off.
    `pins` maps each fetch or pin in the own pool to its leg. `refused` remembers cancels that came before their leg.
    `known` has every key that is in one of the places, ended ones included, by request id. `lines` has the waiting
    ones in queue order, each behind its `queue_order`. `load_inside`: tokens that the prefills inside compute.
    """

    limits: Limits
    waiting: dict[Phase, dict[LegKey, QueuedLeg]] = field(default_factory=lambda: {phase: {} for phase in PHASES})
    inside: dict[Phase, dict[LegKey, QueuedLeg]] = field(default_factory=lambda: {phase: {} for phase in PHASES})
    closing: dict[LegKey, QueuedLeg] = field(default_factory=dict)
    ended: dict[LegKey, float] = field(default_factory=dict)
    refused: dict[LegKey, float] = field(default_factory=dict)
    pins: dict[str, LegKey] = field(default_factory=dict)
    known: dict[str, set[LegKey]] = field(default_factory=dict)
    lines: dict[Phase, list[tuple[float, int, QueuedLeg]]] = field(
        default_factory=lambda: {phase: [] for phase in PHASES}
    )
    load_inside: int = 0

    def add(self, leg: QueuedLeg) -> None:
        """A new leg waits."""
        self.waiting[leg.key.phase][leg.key] = leg
        insort(self.lines[leg.key.phase], (*queue_order(leg), leg))
        self.known.setdefault(leg.key.id, set()).add(leg.key)

    def newest_attempt(self, id: str, phase: Phase) -> int:  # noqa: A002
        """The highest attempt of a request seen here lately, 0 for none."""
        return max((key.attempt for key in self.known.get(id, ()) if key.phase is phase), default=0)

    def of(self, id: str, phase: Phase) -> list[QueuedLeg]:  # noqa: A002
        """The live legs of a request, all attempts."""
        found = [self.find(key) for key in sorted(self.known.get(id, ())) if key.phase is phase]
        return [leg for leg in found if leg is not None]

    def find(self, key: LegKey) -> QueuedLeg | None:
        return self.waiting[key.phase].get(key) or self.inside[key.phase].get(key) or self.closing.get(key)

    def all(self) -> Iterator[QueuedLeg]:
        for phase in PHASES:
            yield from self.waiting[phase].values()
            yield from self.inside[phase].values()
        yield from self.closing.values()

    def in_order(self, phase: Phase) -> list[QueuedLeg]:
        return [leg for _, _, leg in self.lines[phase]]

    def position(self, leg: QueuedLeg) -> int:
        """How many legs of its phase wait before this one, which need not be among them."""
        return bisect_left(self.lines[leg.key.phase], queue_order(leg))

    def _no_longer_waits(self, leg: QueuedLeg) -> None:
        if self.waiting[leg.key.phase].pop(leg.key, None) is not None:
            del self.lines[leg.key.phase][self.position(leg)]

    def _count(self, leg: QueuedLeg, sign: int) -> None:
        """A leg came into the engine (1) or left it (-1); inside it, what it will compute does not change."""
        if leg.key.phase is PREFILL:
            self.load_inside += sign * leg.load_tokens

    def pin(self, leg: QueuedLeg, fetch_id: str) -> None:
        assert leg.fetch_id is None, leg
        leg.fetch_id = fetch_id
        self.pins[fetch_id] = leg.key

    def unpin(self, leg: QueuedLeg) -> list[Effect]:
        """Give back what the leg holds in the own pool."""
        if leg.fetch_id is None:
            return []
        fetch_id, leg.fetch_id = leg.fetch_id, None
        del self.pins[fetch_id]
        return [Release(fetch_id)]

    def enter(self, leg: QueuedLeg) -> None:
        """waiting -> inside."""
        self._no_longer_waits(leg)
        self.inside[leg.key.phase][leg.key] = leg
        self._count(leg, 1)
        leg.state = RequestState.RESERVED

    def close(self, leg: QueuedLeg) -> None:
        """inside -> closing."""
        del self.inside[leg.key.phase][leg.key]
        self._count(leg, -1)
        self.closing[leg.key] = leg

    def end(self, leg: QueuedLeg, finish: Finish, reason: str, now: float) -> list[Effect]:
        """The leg is over: it holds nothing from here on."""
        key = leg.key
        self._no_longer_waits(leg)
        if self.inside[key.phase].pop(key, None) is not None:
            self._count(leg, -1)
        self.closing.pop(key, None)
        leg.state = RequestState.ENDED
        self.ended[key] = now + self.limits.keep_s
        report = Report(
            key,
            leg.request.router,
            finish=finish,
            reason=reason,
            cached_tokens=leg.cached_tokens,
            restored_tokens=leg.restored_tokens,
            stop_token_ids=tuple(leg.request.sampling.stop_token_ids),
        )
        return [*self.unpin(leg), report]

    def forget(self, now: float) -> list[Effect]:
        """Drop what was kept of legs that ended long ago."""
        old = [key for key, until in self.ended.items() if until <= now]
        for key in old:
            del self.ended[key]
            self.known[key.id].remove(key)
            if not self.known[key.id]:
                del self.known[key.id]
        for key in [key for key, until in self.refused.items() if until <= now]:
            del self.refused[key]
        return [Forget(key) for key in old]

    def check(self) -> None:
        keys = [leg.key for leg in self.all()] + list(self.ended)
        assert len(keys) == len(set(keys)), "a leg is in two places"
        assert set(keys) == {key for known in self.known.values() for key in known}, "`known` is not what is here"
        held = {leg.fetch_id: leg.key for leg in self.all() if leg.fetch_id is not None}
        assert held == self.pins, f"pins {self.pins} are not those of the legs, {held}"
        for phase in PHASES:
            assert all(key.phase is phase for key in (*self.waiting[phase], *self.inside[phase]))
            assert self.in_order(phase) == sorted(self.waiting[phase].values(), key=queue_order)
        inside = self.inside[PREFILL].values()
        assert self.load_inside == sum(leg.load_tokens for leg in inside)
        for leg in self.waiting[PREFILL].values():
            assert leg.state in (RequestState.QUEUED, RequestState.FETCHING, RequestState.READY), leg
            assert leg.ask == 0 or leg.state is RequestState.READY, leg
            assert (leg.state is RequestState.FETCHING) <= (leg.fetch_id is not None), leg
        for leg in self.waiting[DECODE].values():
            assert leg.state is RequestState.QUEUED, leg
            assert leg.fetch_id is None, leg
        assert all(leg.told is None and leg.token is not None for leg in self.closing.values())
