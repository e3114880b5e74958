"""What pools are told of values against a naive count of who claims which block, and the scale and model behind it."""

import random
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from schemas.branch import BranchEventType
from schemas.kv import NEUTRAL, Capacities
from schemas.kv import keys_of as unpack
from schemas.phase import Phase
from services.directory.core.effects import ReferencesChanged, ValuesChanged
from services.directory.core.run import path
from services.directory.core.waits import BINS, EDGES_S, WaitKind, Waits, bin_of
from services.directory.core.worth import AWAKE, LARGEST, DepthCost, rate_of, step_of
from tests.unit.directory_bench import Bench, chain, hello, removed, stored

NODES = ("a", "b")
DOUBLING_TOKENS = 64
"""Four blocks: depth counts within these short contexts."""


class Pool:
    """What one pool makes of what it is told: bits and values of its copies, as the protocol says."""

    def __init__(self) -> None:
        self.referenced: dict[int, bool] = {}
        self.values: dict[tuple[int, bool], int] = {}

    def hear(self, effect: ReferencesChanged | ValuesChanged) -> None:
        if isinstance(effect, ReferencesChanged) and effect.full:
            self.referenced.clear()
            self.values.clear()
        for key in unpack(effect.keys).tolist():
            if isinstance(effect, ValuesChanged):
                self.values[key, effect.referenced] = effect.value
            else:
                if self.referenced.get(key, False) != effect.referenced:
                    self.values.pop((key, not effect.referenced), None)
                self.referenced[key] = effect.referenced


class World:
    """A directory, two small nodes, and contexts over few labels, so that paths meet."""

    def __init__(self, seed: int) -> None:
        self.rnd = random.Random(seed)
        self.bench = Bench(scarce_share=0.25, depth_doubling_tokens=DOUBLING_TOKENS)
        self.pools = {node: Pool() for node in NODES}
        self.held: dict[str, set[int]] = {node: set() for node in NODES}
        self.seq = dict.fromkeys(NODES, 0)
        self.contexts: list[list[str]] = [[]]
        self.requests = self.epoch = 0
        for node in NODES:
            room = Capacities(l1_tokens=0, l2_tokens=self.rnd.choice((16 * 4, 16 * 40)))
            self.bench.done(self.bench.core.on_hello(hello(node, capacities=room), 0.0))
            self.bench.snapshot(node, 0)

    def context(self) -> list[int]:
        base = self.rnd.choice(self.contexts[-8:])
        labels = base[: self.rnd.randint(0, len(base))] + self.rnd.choices("xyz", k=self.rnd.randint(1, 5))
        self.contexts.append(labels)
        return chain(*labels)

    def step(self) -> None:
        node, branch = self.rnd.choice(NODES), self.rnd.choice("ABC")
        match self.rnd.choice(("answer", "answer", "ask", "store", "store", "drop", "end", "wait", "list", "switch")):
            case "answer":
                self.requests += 1
                parent = {"parent": "A"} if branch != "A" else {}
                other = self.rnd.choice(NODES)
                request = f"{branch}{self.rnd.randint(0, 2)}"
                self.bench.answered(branch, self.context(), node, other, request=request, finish="stop", **parent)
            case "ask":
                request = f"{branch}{self.rnd.randint(0, 2)}"
                version = self.rnd.choice((None, 5))
                self.bench.match(self.context(), branch=branch, request=request, version=version)
            case "store":
                keys = self.context()
                self.change(node, stored(keys))
                self.held[node].update(keys)
            case "drop" if self.held[node]:
                key = self.rnd.choice(sorted(self.held[node]))
                self.held[node].remove(key)
                self.change(node, removed([key]))
                for pool_key in [pair for pair in self.pools[node].values if pair[0] == key]:
                    del self.pools[node].values[pool_key]
                self.pools[node].referenced.pop(key, None)
            case "end":
                self.bench.tell(branch, BranchEventType.END, cascade=self.rnd.random() < 0.5)
            case "wait":
                self.beat()
                self.bench.tick(self.rnd.choice((1.0, 8.0, 100.0, 2000.0)))
                self.beat()
            case "switch":
                self.epoch += 1
                self.bench.switch(node, self.rnd.choice((Phase.PREFILL, Phase.DECODE)), self.epoch)
            case "list":
                self.bench.done(self.bench.core.list_references(node))
        self.hear()

    def change(self, node: str, change: object) -> None:
        self.seq[node] += 1
        self.bench.say(node, self.seq[node], change)  # type: ignore[arg-type]

    def beat(self) -> None:
        for node in NODES:
            self.bench.say(node, self.seq[node])

    def hear(self) -> None:
        for effect in self.bench.effects:
            if isinstance(effect, ReferencesChanged | ValuesChanged):
                self.pools[effect.node].hear(effect)
        self.bench.effects.clear()

    def expected(self, key: int) -> int:
        """What a claimed block is worth by the definition."""
        core = self.bench.core
        run, offset = core.tree.find(key) or pytest.fail("a claimed block is unknown")
        rate, depth, awake = 0.0, 0, False
        for branch in core.branches.newest_first():
            claim = branch.claim
            if claim is None:
                continue
            stretches = list(path(claim.tip))
            if dict(stretches).get(run, 0) > offset:
                step = core.values.stretches._steps[branch]
                rate, awake = rate + rate_of(step), awake or step == AWAKE
                depth = offset + sum(end for at, end in stretches[[r for r, _ in stretches].index(run) + 1 :])
        cost = DepthCost(DOUBLING_TOKENS / 16).steps(depth)
        return AWAKE if awake else min(LARGEST, step_of(rate) + cost)

    def check(self) -> None:
        self.beat()
        self.bench.tick(0.0)
        self.hear()
        for node, pool in self.pools.items():
            if node in self.bench.core.values.scarce and not self.bench.core.locations.nodes[node].lost:
                told = {
                    key: pool.values.get((key, True), NEUTRAL) for key, claimed in pool.referenced.items() if claimed
                }
                assert told == {key: self.expected(key) for key in told}


@settings(max_examples=60, deadline=None)
@example(35)
@example(661)
@given(st.integers(0, 10**6))
def test_a_scarce_pool_knows_what_every_claimed_copy_is_worth(seed: int) -> None:
    world = World(seed)
    for _ in range(25):
        world.step()
        world.check()


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 5000.0), st.booleans()), max_size=60))
def test_keeping_is_worth_no_more_than_the_best_bin_says(waits: list[tuple[float, bool]]) -> None:
    model, kind = Waits(), WaitKind("stop", children=False, pace=1)
    for waited_s, back in waits:
        (model.returned if back else model.lost)(kind, waited_s)
    model.refit()
    model.check()
    assert len(model.rates(kind)) == BINS


@given(st.floats(0.0, 1e6))
def test_every_age_has_its_bin(age_s: float) -> None:
    at = bin_of(age_s)
    assert EDGES_S[at] <= age_s
    assert at == BINS - 1 or age_s < EDGES_S[at + 1]


@given(st.integers(1, 5000), st.integers(0, 3000), st.integers(1, 3000))
def test_pieces_of_equal_depth_cost_cover_a_stretch_once(doubling: int, first: int, blocks: int) -> None:
    cost = DepthCost(doubling)
    pieces = cost.pieces(first, first + blocks)
    ends = [first, *(end for end, _ in pieces)]
    assert all(a < b for a, b in pairwise(ends))
    assert ends[-1] == first + blocks
    for (begin, end), (_, steps) in zip(pairwise(ends), pieces, strict=True):
        assert cost.steps(begin) == cost.steps(end - 1) == steps


def test_steps_and_rates_are_each_others_inverse() -> None:
    assert [step_of(rate_of(step)) for step in range(1, 100)] == list(range(1, 100))
