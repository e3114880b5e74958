"""Dynamo's planner and KV router beside what their own code answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.phase import Phase
from services.simulator.system import Move
from services.simulator.systems.dynamo_1_6_1 import Dynamo161
from services.simulator.systems.dynamo_kv_router import DynamoKvRouter
from services.simulator.systems.dynamo_planner import clamp_1_5_1, decode_wish, guard_1_6_1, prefill_wish
from services.simulator.systems.dynamo_router import KvRouter, Overlap, prefill_cost
from tests.system_stage import BLOCK, StillCluster, call, placed

SPLITS = [(p, 9 - p) for p in range(1, 9)]


@pytest.mark.parametrize(
    ("ready", "wish", "ordered"),
    # answers of proportional_clamp_pair in the 1.5.1 wheel, 4 GPUs a worker, 36 <= GPUs <= 36
    [
        *((split, (1, 0), (0, 0)) for split in SPLITS),
        *((split, (0, 1), (-1, 1)) for split in SPLITS[1:]),
        ((1, 8), (0, 1), (0, 0)),
        *((split, (1, 1), (0, 0)) for split in SPLITS[:4]),
        *((split, (1, 1), (-1, 1)) for split in SPLITS[4:]),
        *((split, (0, -1), (0, -1)) for split in SPLITS[:7]),
        *((split, (-1, 0), (-1, 0)) for split in SPLITS[1:]),
        ((5, 4), (-1, -1), (1, -1)),
        ((4, 5), (-1, -1), (0, 0)),
        ((5, 3), (1, 0), (1, 0)),
        ((5, 3), (1, 1), (0, 1)),
        ((5, 3), (-1, 0), (1, 0)),
        ((5, 3), (0, -1), (2, -1)),
        ((2, 6), (-1, 0), (0, 1)),
        ((2, 6), (0, -1), (1, 0)),
        ((6, 2), (-1, -1), (2, -1)),
    ],
)
def test_1_5_1_gives_decode_what_it_takes_from_prefill(
    ready: tuple[int, int], wish: tuple[int, int], ordered: tuple[int, int]
) -> None:
    got = clamp_1_5_1(ready, (ready[0] + wish[0], ready[1] + wish[1]), 9)
    assert (got[0] - ready[0], got[1] - ready[1]) == ordered


@pytest.mark.parametrize(
    ("ready", "wish", "ordered"),
    # answers of guard_disagg_scaling_budget in the 1.6.1 wheel, same budget
    [
        *(
            (split, wish, (0, 0))
            for split in SPLITS[1:7]
            for wish in ((1, 0), (0, 1), (1, 1), (-1, 0), (0, -1), (-1, -1))
        ),
        *((split, (1, -1), (1, -1)) for split in SPLITS[:7]),
        *((split, (-1, 1), (-1, 1)) for split in SPLITS[1:]),
        ((5, 3), (1, 0), (1, 0)),
        ((5, 3), (0, 1), (0, 1)),
        ((5, 3), (1, 1), (0, 1)),
        ((5, 3), (-1, 0), (0, 0)),
        ((5, 3), (0, -1), (0, 0)),
        ((5, 3), (-1, -1), (0, 0)),
        ((2, 6), (1, -1), (1, -1)),
    ],
)
def test_1_6_1_moves_opposing_pairs_only(
    ready: tuple[int, int], wish: tuple[int, int], ordered: tuple[int, int]
) -> None:
    got = guard_1_6_1(ready, (ready[0] + wish[0], ready[1] + wish[1]), 9)
    assert (got[0] - ready[0], got[1] - ready[1]) == ordered


@given(st.integers(2, 64), st.data())
def test_budgets_never_use_more_nodes_than_there_are_nor_empty_a_phase(nodes: int, data: st.DataObject) -> None:
    total = data.draw(st.integers(max(2, nodes - 1), nodes))
    prefill = data.draw(st.integers(1, total - 1))
    ready = prefill, total - prefill
    step = st.integers(-1, 1)
    wished = max(1, ready[0] + data.draw(step)), max(1, ready[1] + data.draw(step))
    for budget in (clamp_1_5_1, guard_1_6_1):
        ordered = budget(ready, wished, nodes)
        assert min(ordered) >= 1
        assert sum(ordered) <= nodes
    held = guard_1_6_1(ready, wished, nodes)
    for before, wish, after in zip(ready, wished, held, strict=True):
        assert min(before, wish) <= after <= max(before, wish), "1.6.1 moves nobody who did not ask"


def test_wishes_follow_the_default_thresholds() -> None:
    assert prefill_wish([0.0, 1.0], 2, consolidates=False) == 3, "any queue of a whole context"
    assert prefill_wish([0.09, 0.0], 2, consolidates=False) == 1, "all below a tenth"
    assert prefill_wish([0.1, 0.0], 2, consolidates=False) == 2
    assert decode_wish([1.0, 0.2], 2, consolidates=False) == 2, "usage must exceed 1"
    assert decode_wish([1.01, 0.2], 2, consolidates=False) == 3
    assert decode_wish([0.59, 0.59], 2, consolidates=False) == 1
    assert prefill_wish([0.0], 1, consolidates=False) == 1, "the last one stays"


def test_1_6_1_keeps_a_worker_whose_load_would_ask_for_it_again() -> None:
    assert decode_wish([0.5, 0.1], 2, consolidates=True) == 2, "0.5 x 2 / 1 reaches 1"
    assert decode_wish([0.5, 0.1], 2, consolidates=False) == 1
    assert decode_wish([0.49, 0.1], 2, consolidates=True) == 1
    assert decode_wish([0.59] * 3, 3, consolidates=True) == 2


def test_a_full_decode_node_costs_1_5_1_a_prefill_node_and_1_6_1_nothing() -> None:
    cluster = StillCluster(6, 3)
    cluster["d1"].decode_kv, cluster["d1"].waiting_decode_kv = 2_000_000, 1_000_000
    for node in ("p0", "p1", "p2", "p3", "p4", "p5"):
        cluster[node].queues(300_000)
    for system, expected in ((DynamoKvRouter(), [("p5", Phase.DECODE)]), (Dynamo161(), [])):
        system.begin(cluster, 0.0)
        moves = [action for action in system.wake(5.0) if isinstance(action, Move)]
        assert [(move.node, move.phase) for move in moves] == expected
        assert system.next_wake(5.0) == 10.0


def test_nothing_is_decided_while_a_worker_starts_and_a_free_node_is_used_first() -> None:
    cluster = StillCluster(5, 3)
    cluster.nodes["x0"] = idle = type(cluster["p0"])("x0", None, moving=True)
    for node in ("p0", "p1", "p2", "p3", "p4"):
        cluster[node].queues(1_100_000)
    for node in ("d0", "d1", "d2"):
        cluster[node].decode_kv = 2_000_000
    system = DynamoKvRouter()
    system.begin(cluster, 0.0)
    assert not system.wake(5.0)
    idle.moving = False
    assert [(move.node, move.phase) for move in system.wake(10.0) if isinstance(move, Move)] == [("x0", Phase.PREFILL)]


def test_cost_is_blocks_to_compute_less_what_is_credited() -> None:
    # the router guide's example: a request of 10 blocks, 2, 5 and 8 of them cached
    assert [prefill_cost(640, 0, Overlap(device=cached), BLOCK) for cached in (2, 5, 8)] == [8, 5, 2]
    assert prefill_cost(640, 640, Overlap(device=5), BLOCK) == 15
    assert prefill_cost(640, 0, Overlap(device=2, host=4), BLOCK) == 5, "host blocks count three quarters"
    assert prefill_cost(640, 0, Overlap(device=2, shared=10), BLOCK) == 4, "shared ones half, beyond the device"
    assert prefill_cost(64, 0, Overlap(device=9), BLOCK) == 0


def test_a_booked_prompt_counts_until_its_prefill_ends() -> None:
    cluster, router = StillCluster(), KvRouter()
    first, second = call(640), call(640)
    cluster["p1"].holds[first.id] = (8, 8)
    cluster["p1"].holds[second.id] = (1, 1)
    assert router.prefill(first, cluster.serving(Phase.PREFILL), cluster) == "p1"
    assert router.prefill(second, cluster.serving(Phase.PREFILL), cluster) == "p0", "2 blocks booked on p1 weigh more"
    router.prefilled(first)
    router.prefilled(second)
    assert router.prefill(second, cluster.serving(Phase.PREFILL), cluster) == "p1"


def test_ties_are_drawn_and_decode_takes_the_fewest_blocks() -> None:
    cluster = StillCluster(2, 3, draws=[0.9])
    assert KvRouter().prefill(call(), cluster.serving(Phase.PREFILL), cluster) == "p1"
    cluster["d0"].decodes(10_000, 10_000)
    cluster["d1"].decodes(19_000)
    cluster["d2"].decodes(100_000)
    assert KvRouter().decode(cluster.serving(Phase.DECODE), cluster) == "d1"


def test_requests_wait_while_a_phase_has_no_worker() -> None:
    cluster, system = StillCluster(1, 1), DynamoKvRouter()
    system.begin(cluster, 0.0)
    cluster["d0"].phase = None
    request = call()
    assert not system.arrived(request, 1.0)
    cluster["d0"].phase = Phase.DECODE
    assert placed(system.moved("d0", 700.0))[request.id].decode == "d0"
