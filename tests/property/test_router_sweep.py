"""The prediction over all nodes at once is the prediction for each of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.directory import MatchReply, Piece
from schemas.kv import Capacities, NodeHello
from schemas.phase import Phase
from schemas.telemetry import KvUse, NodeTelemetry, TierUse
from services.router.core.nodes import Node
from services.router.core.placement import FetchCost, PrefillView, Prompt, choose_prefill, predict
from services.router.core.roster import Holders, Roster
from services.router.core.sweep import FetchRow, Sweep
from services.router.core.timing import Coefficients
from tests.property.test_router_prefixes import BLOCK, NODES, matches

small = st.floats(0, 1e-4)
models = st.builds(
    Coefficients,
    c0=st.floats(0, 0.2),
    c1=small,
    c2=st.floats(0, 1e-7),
    c3=small,
    c4=st.floats(0, 2),
    c5=small,
    u0=st.integers(0, 500),
    uncached_per_iteration=st.none() | st.floats(1, 5000),
)


def uniform(cost: FetchCost) -> FetchRow:
    """The same rate and latency between all nodes."""
    return lambda _: (cost.tokens_per_s, cost.latency_s)


def node(name: str, used: int, referenced: int, total: int, phase: Phase = Phase.BOTH) -> Node:
    pool = TierUse(used=min(used, total), total=total, referenced=min(referenced, used, total))
    beat = NodeTelemetry(
        node=name,
        t=0.0,
        incarnation=1,
        phase=phase,
        epoch=0,
        waiting=0,
        running=0,
        kv=KvUse(l1=TierUse(used=0, total=1000), l2=pool),
        last_kv_seq=0,
    )
    hello = NodeHello(
        node=name,
        incarnation=1,
        engine_incarnation=1,
        model="m",
        block_size=BLOCK,
        key_version="1",
        ranks=1,
        engine="timed",
        dtype="x",
        capacities=Capacities(l1_tokens=1000, l2_tokens=total, running=8),
        transfer="",
    )
    return Node(name, hello, beat, heard=0.0, phase=phase)


@settings(deadline=None, max_examples=150)
@given(
    matches(),
    st.integers(1, 800),
    st.lists(models, min_size=4, max_size=4),
    st.lists(st.floats(0, 10), min_size=8, max_size=8),
    st.lists(st.integers(0, 2000), min_size=8, max_size=8),
    st.sets(st.sampled_from(NODES)),
    st.sets(st.sampled_from(NODES), min_size=1),
    st.none() | st.tuples(st.sampled_from(NODES), st.integers(0, 60)),
    st.dictionaries(st.sampled_from(NODES), st.floats(0, 1)),
    st.floats(1, 1e6),
    st.integers(0, 9),
    st.lists(st.integers(1, 800), max_size=5).map(lambda ends: tuple(sorted(ends))),
)
def test_every_node_gets_the_prediction_it_would_get_alone(
    match: MatchReply,
    tokens: int,
    coefficients: list[Coefficients],
    times: list[float],
    pools: list[int],
    usable: set[str],
    asked: set[str],
    pending: tuple[str, int] | None,
    shares: dict[str, float],
    rate: float,
    turn: int,
    media_ends: tuple[int, ...],
) -> None:
    match = MatchReply(
        blocks=match.blocks,
        pieces=match.pieces,
        nodes=match.nodes,
        pending_node=pending[0] if pending else None,
        pending_blocks=pending[1] if pending else 0,
        referenced_share=shares,
    )
    media_ends = tuple(min(end, tokens) for end in media_ends)
    prompt, cost = Prompt(tokens, BLOCK, match, media_ends), FetchCost(rate, 0.003)
    roster = Roster()
    nodes = [
        node(name, used, referenced, 1500) for name, used, referenced in zip(NODES, pools, pools[4:], strict=False)
    ]
    for one, model in zip(nodes, coefficients, strict=True):
        roster.put(one, model)
    roster.check()
    waits = np.array(times[:4]), np.array(times[4:])
    mask = np.array([name in asked for name in roster.names])
    use = np.array([name in usable for name in roster.names])
    sweep = Sweep(prompt, Holders(prompt.match, roster.index), roster, mask, use, uniform(cost), lambda _: waits)
    alone = []
    for at, (one, model) in enumerate(zip(nodes, coefficients, strict=True)):
        if one.name in asked:
            assert one.telemetry is not None
            pool = one.telemetry.kv.l2
            view = PrefillView(one.name, times[at], times[4 + at], pool.total, pool.used, pool.referenced, model)
            alone.append(predict(prompt, view, usable.__contains__, lambda *_: cost))
    assert [found.node for found in sweep] == [found.node for found in alone]
    for found, expected in zip(sweep, alone, strict=True):
        assert (found.work, found.fetch) == (expected.work, expected.fetch)
        for name in ("remaining_s", "queue_s", "service_s", "fetch_s", "duplicate_s", "ttft_s"):
            assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-9, abs=1e-12), name
    best = min(found.ttft_s for found in alone)
    assert sweep.best(turn).ttft_s == pytest.approx(best, rel=1e-9, abs=2e-9)
    assert [found.ttft_s for found in sweep.first(3)] == pytest.approx(
        sorted(found.ttft_s for found in alone)[:3], rel=1e-9, abs=1e-12
    )
    if len({round(found.ttft_s, 6) for found in alone}) == len(alone):
        assert sweep.best(turn).node == choose_prefill(alone, turn).node


def test_liveness_is_a_matter_of_time_and_of_the_bus() -> None:
    roster = Roster()
    for at, name in enumerate(("b", "a")):
        one = node(name, 0, 0, 10)
        one.heard = float(at)
        roster.put(one, Coefficients())
    roster.put(Node("c"), Coefficients())
    assert roster.names == ("a", "b", "c")
    alive = roster.alive(3.5, 3.0, float("-inf"), suspended=False)
    assert alive.tolist() == [True, False, False]
    assert roster.alive(3.5, 3.0, 2.0, suspended=False).tolist() == [True, True, False]
    assert roster.alive(99.0, 3.0, 0.0, suspended=True).tolist() == [True, True, False]


def test_equal_nodes_take_turns() -> None:
    roster = Roster()
    for name in NODES:
        roster.put(node(name, 0, 0, 10), Coefficients())
    everyone = np.ones(4, bool)
    match = MatchReply(blocks=0)
    sweep = Sweep(
        Prompt(100, BLOCK, match),
        Holders(match, roster.index),
        roster,
        everyone,
        everyone,
        uniform(FetchCost(1.0, 0.0)),
        lambda _: (np.zeros(4), np.zeros(4)),
    )
    assert [sweep.best(turn).node for turn in range(5)] == ["a", "b", "c", "d", "a"]


def test_rates_may_differ_between_nodes() -> None:
    roster = Roster()
    for name in NODES:
        roster.put(node(name, 0, 0, 10_000), Coefficients(c1=1.0))
    match = MatchReply(
        blocks=20, pieces=[Piece(first=0, last=12, nodes=["a"]), Piece(first=12, last=20, nodes=["b", "c"])]
    )
    rates, latencies = np.array([1.0, 2.0, 4.0, 8.0]), np.array([0.1, 0.2, 0.3, 0.4])
    everyone = np.ones(4, bool)
    sweep = Sweep(
        Prompt(20 * BLOCK + 1, BLOCK, match),
        Holders(match, roster.index),
        roster,
        everyone,
        everyone,
        lambda source: (rates, latencies) if source == "a" else (100.0, 0.5),
        lambda _: (np.zeros(4), np.zeros(4)),
    )
    fetched = {found.node: found.fetch_s for found in sweep}
    first, second = 12 * BLOCK, 8 * BLOCK
    assert fetched["a"] == pytest.approx(second / 100 + 0.5)
    assert fetched["b"] == pytest.approx(first / 2 + 0.2)
    assert fetched["d"] == pytest.approx(first / 8 + 0.4 + second / 100 + 0.5)
