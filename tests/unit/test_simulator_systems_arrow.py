"""Arrow's three algorithms on small pools, in numbers of its cost model."""

import pytest

from schemas.phase import Phase
from services.simulator.system import Action, Move
from services.simulator.systems.arrow import Arrow
from tests.system_stage import StillCluster, call, placed

TOKENS = 20_000
"""Predicted prefill: 0.1 + 20,000 x 34 us + 2.0001e8 pairs x 0.235 ns = 0.827 s."""


def system_on(prefill: int, decode: int, **given: float) -> tuple[StillCluster, Arrow]:
    cluster, system = StillCluster(prefill, decode), Arrow(**given)
    system.begin(cluster, 0.0)
    return cluster, system


def moves(actions: object) -> list[tuple[str, Phase | None]]:
    assert isinstance(actions, (list, tuple))
    found: list[Action] = list(actions)
    return [(move.node, move.phase) for move in found if isinstance(move, Move)]


def test_prefill_time_is_quadratic_in_the_whole_prompt() -> None:
    _, system = system_on(1, 1)
    assert system.prefill_s(TOKENS) == pytest.approx(0.1 + 0.68 + 200_010_000 * 2.35e-10)


def test_prefill_is_where_no_decode_is_left_then_where_it_ends_first_and_cache_does_not_count() -> None:
    cluster, system = system_on(3, 1, ttft_s=2.0)
    request = call(TOKENS)
    cluster["p0"].decodes(5_000)
    cluster["p1"].prefills(10_000)
    cluster["p1"].holds[request.id] = (312, 312)
    assert placed(system.arrived(request, 0.0))[request.id].prefill == "p2"
    cluster["p2"].queues(15_000)
    assert placed(system.arrived(request, 0.0))[request.id].prefill == "p1", "still within the objective"
    cluster["p1"].queues(TOKENS)
    cluster["p2"].queues(TOKENS)
    assert placed(system.arrived(request, 0.0))[request.id].prefill == "p0", "the others miss the objective"


def test_most_tokens_within_the_objective_solves_the_decode_model() -> None:
    cluster, system = system_on(1, 1)
    most = system.most_tokens(16, 1 << 40)
    times = cluster.times
    phi = 1 - (1 - 8 / 256) ** (4 * 16)
    iteration_s = times.d0 + times.d1 * phi + times.d2 * 16 + times.d3 * most / 1e6
    assert iteration_s / cluster.hardware.accepted_tokens == pytest.approx(0.05)
    assert system.most_tokens(16, 1_000) == 1_000, "never beyond memory"


def test_a_missed_ttft_relabels_the_lightest_decode_instance_and_uses_it() -> None:
    cluster, system = system_on(1, 3)
    cluster["p0"].queues(TOKENS)
    cluster["d0"].decodes(9_000)
    cluster["d1"].decodes(8_000)
    cluster["d2"].decodes(50_000)
    cluster["d2"].queues(100)
    request = call(TOKENS)
    assert moves(system.arrived(request, 1.0)) == [("d2", Phase.PREFILL)], "one that still prefills goes first"
    cluster["d2"].prefill_calls.clear()
    assert moves(system.arrived(call(TOKENS), 1.0)) == [("d1", Phase.PREFILL)]
    cluster["d1"].phase = Phase.PREFILL
    cluster["d1"].decode_kv = 0
    assert system.next_wake(1.0) == 1.0
    assert placed(system.wake(1.0))[request.id].prefill == "d1"


def test_decode_under_load_or_its_last_instance_is_not_taken() -> None:
    cluster, system = system_on(1, 2, tpot_s=0.012)
    cluster["p0"].queues(TOKENS)
    request = call(TOKENS)
    for node in ("d0", "d1"):
        cluster[node].decodes(*[1_000] * 10)
    assert system.decode_load() > 0.5
    assert placed(system.arrived(request, 0.0))[request.id].prefill == "p0", "the cheapest, objective or not"
    single, system = system_on(1, 1)
    single["p0"].queues(TOKENS)
    assert placed(system.arrived(request, 0.0))[request.id].prefill == "p0"


def test_a_full_decode_pool_takes_a_prefill_instance_at_most_every_ten_seconds() -> None:
    cluster, system = system_on(4, 1)
    cluster["d0"].decode_kv = 2_890_000
    cluster["p1"].prefills(100)
    cluster["p2"].decodes(100)
    cluster["p2"].prefills(5_000)
    request = call(TOKENS)
    assert placed(system.arrived(request, 9.9))[request.id].decode == "d0", "the first ten seconds are quiet too"
    assert moves(system.arrived(request, 10.0)) == [("p2", Phase.DECODE)], "one that still decodes goes first"
    assert placed(system.wake(10.0))[request.id].decode == "d0"
    assert not moves(system.arrived(call(TOKENS), 19.9))


def test_the_monitor_acts_on_the_third_pass_in_a_row() -> None:
    cluster, system = system_on(3, 1, tpot_s=0.015)
    cluster["d0"].decodes(*[50_000] * 24)
    assert 0.5 <= system.decode_load() < 1.0
    assert system.prefill_load() == 0.0
    assert not moves(system.wake(10.0))
    assert not moves(system.wake(11.0))
    cluster["p0"].queues(*[TOKENS] * 2)
    assert not moves(system.wake(12.0)), "prefill load is 0.55 now: the row is broken"
    cluster["p0"].prefill_calls.clear()
    assert [bool(moves(system.wake(float(now)))) for now in (13, 14, 15)] == [False, False, True]
