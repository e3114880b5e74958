"""Parts of the planner alone: candidates, demand, tests of gains, probation."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from schemas.phase import Phase
from schemas.telemetry import RequestTelemetry
from services.planner.core.candidates import candidates, masks
from services.planner.core.demand import Demand, Pauses
from services.planner.core.fleet import Node
from services.planner.core.moves import Move
from services.planner.core.options import DecideSettings
from services.planner.core.probation import Expected, Look, Probation
from services.planner.core.significance import corrected_test, every_slice_test, plain_test
from services.planner.core.windows import Slice, SliceKind

PHASES = st.sampled_from(list(Phase))


def node(name: str, phase: Phase, waiting: int = 0, decoding: int = 0, referenced: int = 0) -> Node:
    return Node(name, phase, 0, 1, 0, decoding, waiting, referenced, 0.0)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(PHASES, st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=9),
    st.sets(st.integers(0, 8)),
)
def test_candidates_are_every_split_that_can_be_made(shape: list[tuple[Phase, int, int]], pinned: set[int]) -> None:
    nodes = [node(f"n{at}", phase, 0, running, kv) for at, (phase, running, kv) in enumerate(shape)]
    kept = {f"n{at}" for at in pinned}
    found = candidates(nodes, kept)
    fixed = [one for one in nodes if one.name in kept]
    if any(one.phase is Phase.BOTH for one in fixed):
        assert found == []
        return
    least = max(1, sum(one.phase is Phase.PREFILL for one in fixed))
    most = len(nodes) - max(1, sum(one.phase is Phase.DECODE for one in fixed))
    assert [one.split.prefill for one in found] == list(range(least, most + 1))
    for one in found:
        assert one.phases.count(Phase.PREFILL) == one.split.prefill
        assert not set(one.nodes) & kept
        assert len(one.moves) == sum(old.phase is not new for old, new in zip(nodes, one.phases, strict=True))
    prefill, decode = masks([one.phases for one in found])
    if found:
        assert ((prefill + decode) == 1).all()


def record(branch: str, arrive: float, end: float, lineage: str = "extends", t_uc: int = 100) -> RequestTelemetry:
    return RequestTelemetry(
        id="t",
        t=end,
        request="r",
        branch=branch,
        version=0,
        outcome="stop",
        t_arrive=arrive,
        t_end=end,
        uncached_tokens=t_uc,
        cached_tokens=1000,
        output_tokens=10,
        lineage=lineage,
    )


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5000), st.none() | st.floats(0, 50)), max_size=30), st.integers(0, 30))
def test_demand_adds_up_wherever_it_is_cut(requests: list[tuple[int, float | None]], cut: int) -> None:
    whole, parts = Demand(), [Demand(), Demand()]
    for at, (t_uc, pause) in enumerate(requests):
        one = record("b", float(at), at + 2.0, t_uc=t_uc)
        whole.add(one, pause)
        parts[at >= cut].add(one, pause)
    both = parts[0].plus(parts[1])
    both.check()
    assert both.workload() == whole.workload()
    assert np.array_equal(both.moments, whole.moments)
    assert both.think_s == pytest.approx(whole.think_s)
    assert both.burstiness() == pytest.approx(whole.burstiness())


def test_agents_follow_from_answers_and_pauses() -> None:
    """Three agents, each busy for 2 s and pausing for 4 s."""
    demand, pauses = Demand(), Pauses()
    for number in range(90):
        agent, turn = number % 3, number // 3
        one = record(f"a{agent}", turn * 6.0, turn * 6.0 + 2.0, lineage="extends")
        demand.add(one, pauses.pause_s(one))
    assert demand.think_s == pytest.approx(4.0)
    one = Slice(0.0, SliceKind.KNOWN, 90, demand.workload(), 1.0, in_flight=1.0, demand=demand)
    assert one.agents(30 * 6.0) == pytest.approx(3.0)


def test_a_branch_that_opens_comes_without_a_pause_and_one_first_seen_says_nothing() -> None:
    pauses = Pauses(keep_s=100.0)
    assert pauses.pause_s(record("new", 0.0, 1.0, "subagent")) == 0.0
    assert pauses.pause_s(record("old", 0.0, 1.0)) is None
    assert pauses.pause_s(record("old", 5.0, 6.0)) == 4.0
    assert pauses.pause_s(record("old", 500.0, 501.0)) is None


def test_bursts_are_seen() -> None:
    even, bursts = Demand(), Demand()
    for number in range(60):
        even.add(record("b", float(number), number + 1.0), None)
        bursts.add(record("b", float(number // 10 * 10), number + 1.0), None)
    assert even.burstiness() < 0.5 < 3 < bursts.burstiness()


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(-1, 1), min_size=5, max_size=5), min_size=1, max_size=8))
def test_the_corrected_test_is_never_laxer_than_the_plain_one(rows: list[list[float]]) -> None:
    gains = np.array(rows)
    for plain, corrected in zip(plain_test(gains, 2.0), corrected_test(gains, 2.0, 0.05, 0.02), strict=True):
        assert corrected.mean == plain.mean
        assert corrected.stderr >= plain.stderr - 1e-12
        assert plain.passes or not corrected.passes
        assert np.isfinite(corrected.threshold)


EXPECTED = Expected(capacity_before_rps=6.0, capacity_rps=4.0, ttft_s=1.0, running=5.0)
MOVES = [Move("n2", Phase.PREFILL, Phase.DECODE)]


def looked(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """Looks (of waiting requests) after a switch of n2 to decode at which it is given up; every 5 s."""
    probation, now = Probation(DecideSettings()), 0.0
    old = [node("n0", Phase.PREFILL), node("n1", Phase.PREFILL), node("n2", Phase.PREFILL), node("n3", Phase.DECODE)]
    for waiting in before:
        old[0].waiting = waiting
        probation.look(old, now)
        now += 5.0
    probation.begin(("d", "3P1D", "2P2D"), MOVES, EXPECTED, now)
    failed = []
    new = [node("n0", Phase.PREFILL), node("n1", Phase.PREFILL), node("n2", Phase.DECODE), node("n3", Phase.DECODE)]
    for at, waiting in enumerate(after):
        new[0].waiting = waiting
        if probation.look(new, now) is not None:
            failed.append(at)
        probation.check()
        now += 5.0
    return failed


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=30), st.data())
def test_queues_as_before_are_no_reason_to_go_back(before: list[int], data: st.DataObject) -> None:
    most = max(1, round(sum(before) / len(before)))
    assert looked(before, data.draw(st.lists(st.integers(0, most), max_size=30))) == []


@settings(deadline=None)
@given(st.lists(st.integers(0, 10), min_size=1, max_size=30))
def test_a_queue_far_above_all_before_is_given_up_at_the_third_look(before: list[int]) -> None:
    assert looked(before, [400] * 10) == [2]
    assert looked(before, [400, 400, 0, 400, 400, 0]) == []
    assert looked(before, [0] * 30 + [400] * 10) == []


def test_a_look_counts_what_waits_for_prefill_and_what_decodes() -> None:
    nodes = [
        node("a", Phase.PREFILL, waiting=3),
        node("b", Phase.DECODE, waiting=9, decoding=4),
        node("c", Phase.BOTH, 1, 2),
    ]
    assert Look.at(nodes) == Look(waiting=4, decoding=6, prefill_nodes=2, decode_nodes=2)


@given(st.lists(st.floats(-0.9, 5.0), min_size=4, max_size=4), st.floats(0.0, 0.9))
def test_every_slice_must_gain(gains: list[float], effect: float) -> None:
    (tested,) = every_slice_test(np.array([gains]), effect)
    assume(abs(min(gains) - effect) > 1e-9)
    assert tested.passes == (min(gains) > effect)
    assert tested.mean == pytest.approx(np.mean(gains))
