"""Sub-agents that start together compute their common prefix once: router and directory cores in virtual time."""

import heapq
from collections.abc import Callable, Iterable
from itertools import count

import pytest

from schemas.block_key import PLAIN, token_bytes
from schemas.directory import MatchQuery
from schemas.kv import Capacities, ChangeType, KvLocation, LocationChange, NodeHello, Tier
from schemas.phase import Phase
from schemas.serve import Finish, LegUpdate, ReplyBatch, RequestState, Sampling, ServeReply
from schemas.telemetry import KvUse, NodeTelemetry, TierUse
from services.directory.core.directory import Directory, DirectoryConfig
from services.router.core.admission import Limits
from services.router.core.context import Context, KeyScheme
from services.router.core.effects import AskDirectory, Effect, EmitTokens, End, ReleaseMatch, SendLeg
from services.router.core.identity import Identity
from services.router.core.router import RouterCore
from services.router.core.spec import Spec
from services.router.core.timing import DEFAULT, Work, prefill_s

BLOCK = 64
COMMON, TAIL = 4096, 64
TICK_S = 0.1
SCHEME = KeyScheme(BLOCK, PLAIN)
ALONE_S = prefill_s(DEFAULT, Work(COMMON + TAIL))


class Cluster:
    """Nodes that prefill one request after the other, store its blocks when it is done, and answer at once."""

    def __init__(self, nodes: Iterable[str]) -> None:
        self.now = 0.0
        self.core = RouterCore(Limits(100), rooms_from=1, node_timeout_s=1e9)
        self.directory = Directory(DirectoryConfig(), incarnation=1)
        self.free_at = dict.fromkeys(nodes, 0.0)
        self.held: dict[str, set[int]] = {node: set() for node in nodes}
        self.sequences = dict.fromkeys(nodes, 0)
        self.computed = 0
        self.sent: dict[str, float] = {}
        self.began: dict[str, float] = {}
        self.first_token: dict[str, float] = {}
        self.ended: set[str] = set()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        for node in nodes:
            self.greet(node)

    def greet(self, node: str) -> None:
        hello = NodeHello(
            node=node,
            incarnation=1,
            engine_incarnation=1,
            model="m",
            block_size=BLOCK,
            key_version=PLAIN,
            ranks=1,
            engine="timed",
            dtype="fp32",
            capacities=Capacities(l1_tokens=1 << 20, l2_tokens=1 << 20),
            transfer="",
        )
        self.core.on_hello(hello, 0.0)
        tier = TierUse(used=0, total=1 << 20)
        beat = NodeTelemetry(
            node=node,
            t=0,
            incarnation=1,
            phase=Phase.BOTH,
            epoch=0,
            waiting=0,
            running=0,
            kv=KvUse(l1=tier, l2=tier),
            last_kv_seq=0,
            engine_incarnation=1,
        )
        self.core.on_telemetry(beat, 0.0)

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), what))

    def ask(self, name: str, tokens: list[int], when: float) -> None:
        spec = Spec(name, Identity(""), Context.of(token_bytes(tokens), SCHEME), Sampling(max_new_tokens=1))
        self.at(when, lambda: self.perform(self.core.submit(spec, self.now)))

    def run(self, until: float) -> None:
        """The clock of the router's ticks goes by 0.1 s."""
        for tick in range(int(until / TICK_S) + 1):
            self.at(tick * TICK_S, lambda: self.perform(self.core.tick(self.now)))
        while self._events:
            self.now, _, what = heapq.heappop(self._events)
            what()
            self.core.check()
            self.directory.check()

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, AskDirectory):
                query = MatchQuery(request=effect.request, hashes=effect.context.keys())
                match = self.directory.match(query, self.now)
                self.perform(self.core.on_match(effect.request, effect.attempt, match, self.now))
            elif isinstance(effect, SendLeg):
                reply = ServeReply(accepted=True, epoch=0)
                given = (effect.request, effect.phase, effect.node, effect.attempt, reply)
                self.perform(self.core.on_answer(*given, self.now))
                if effect.phase is Phase.PREFILL:
                    self.sent[effect.request] = self.now
                    self.prefill(effect)
            elif isinstance(effect, EmitTokens):
                self.first_token.setdefault(effect.request, self.now)
            elif isinstance(effect, ReleaseMatch):
                self.directory.match(MatchQuery(request=effect.request, release=True), self.now)
            elif isinstance(effect, End):
                self.ended.add(effect.request)

    def prefill(self, leg: SendLeg) -> None:
        context = self.core.requests[leg.request].context
        begin = max(self.now, self.free_at[leg.node])
        fetched = {key for source in leg.fetch for key in list(context_keys(context))[source.first : source.last]}
        self.at(begin, lambda: self._begin(leg, context, fetched))
        work = Work(context.tokens)
        self.free_at[leg.node] = begin + prefill_s(DEFAULT, work)

    def _begin(self, leg: SendLeg, context: Context, fetched: set[int]) -> None:
        keys = context_keys(context)
        have = self.held[leg.node] | fetched
        cached = next((n for n, key in enumerate(keys) if key not in have), len(keys)) * BLOCK
        cached = min(cached, context.tokens - 1)
        work = Work(context.tokens - cached, cached)
        self.computed += work.uncached
        self.began[leg.request] = self.now
        self.free_at[leg.node] = self.now + prefill_s(DEFAULT, work)
        self.at(self.free_at[leg.node], lambda: self._done(leg, keys))

    def _done(self, leg: SendLeg, keys: list[int]) -> None:
        node, update = leg.node, {"id": leg.request, "attempt": leg.attempt}
        self.held[node].update(keys)
        self.sequences[node] += 1
        change = LocationChange(type=ChangeType.STORED, tier=Tier.L2, hashes=b"".join(map(packed, keys)))
        said = KvLocation(node=node, incarnation=1, seq=self.sequences[node], changes=[change])
        self.directory.on_location(said, self.now)
        updates = [
            LegUpdate(
                **update,
                phase=Phase.PREFILL,
                state=RequestState.ENDED,
                tokens=token_bytes([7]),
                finish=Finish.LENGTH,
                cached_tokens=0,
            )
        ]
        self.perform(self.core.on_reply(ReplyBatch(node=node, incarnation=1, t=0, updates=updates), self.now))


def packed(key: int) -> bytes:
    return key.to_bytes(8, "little")


def context_keys(context: Context) -> list[int]:
    data = context.keys()
    return [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]


def prompt(number: int) -> list[int]:
    return [*range(COMMON), *(1000 * (number + 9) + offset for offset in range(TAIL))]


@pytest.mark.parametrize("gap_s", [0.0, 0.015])
def test_case_69_four_subagents_compute_their_common_prefix_once(gap_s: float) -> None:
    cluster = Cluster(("p1", "p2", "p3"))
    for number in range(4):
        cluster.ask(f"r{number}", prompt(number), number * gap_s)
    cluster.run(3.0)
    assert cluster.ended == {"r0", "r1", "r2", "r3"}
    assert cluster.computed <= 2 * COMMON + 4 * TAIL
    for number in range(4):
        assert cluster.began[f"r{number}"] - number * gap_s <= ALONE_S + 0.01


def test_case_69_one_alone_is_not_held_up() -> None:
    cluster = Cluster(("p1", "p2", "p3"))
    cluster.ask("r0", prompt(0), 0.0)
    cluster.run(1.0)
    assert cluster.first_token["r0"] == pytest.approx(ALONE_S)
    assert len(cluster.core.siblings) == 0


def test_a_sibling_goes_on_when_the_one_ahead_is_cancelled() -> None:
    cluster = Cluster(("p1", "p2"))
    cluster.ask("r0", prompt(0), 0.0)
    cluster.ask("r1", prompt(1), 0.01)
    cluster.at(0.05, lambda: cluster.perform(cluster.core.on_cancel("r0", cluster.now)))
    cluster.run(2.0)
    assert cluster.sent["r1"] == 0.05


def test_nobody_waits_longer_than_computing_alone_would_take() -> None:
    """The one ahead stands in a long queue of the only node that was there when it came."""
    cluster = Cluster(("p1",))
    cluster.free_at["p1"] = 5.0
    cluster.ask("r0", prompt(0), 0.0)
    cluster.at(0.005, lambda: cluster.free_at.update(p2=0.0))
    cluster.at(0.005, lambda: cluster.held.update(p2=set()))
    cluster.at(0.005, lambda: cluster.sequences.update(p2=0))
    cluster.at(0.005, lambda: cluster.greet("p2"))
    cluster.ask("r1", prompt(1), 0.01)
    cluster.run(8.0)
    assert cluster.sent["r1"] < 0.01 + ALONE_S + TICK_S


def test_another_routers_prefix_is_asked_for_until_it_is_there() -> None:
    cluster = Cluster(("p1", "p2"))
    shared = Context.of(token_bytes(prompt(0)), SCHEME)
    cluster.directory.match(MatchQuery(request="theirs", hashes=shared.keys()), 0.0)
    cluster.ask("r1", prompt(1), 0.0)

    def reported() -> None:
        change = LocationChange(type=ChangeType.STORED, tier=Tier.L2, hashes=shared.keys())
        cluster.sequences["p2"] = 1
        cluster.held["p2"].update(context_keys(shared))
        cluster.directory.on_location(KvLocation(node="p2", incarnation=1, seq=1, changes=[change]), cluster.now)

    cluster.at(0.15, reported)
    cluster.run(2.0)
    assert cluster.computed == TAIL
    assert 0.15 < cluster.began["r1"] <= 0.15 + TICK_S
