"""Llumnix: freeness, pairs of migrations, and scaling within a fixed number of nodes."""

from math import inf

from schemas.phase import Phase
from services.simulator.system import Migrate, Move
from services.simulator.systems.llumnix import Llumnix, steps
from tests.system_stage import StillCluster, call, placed

MEMORY = 160_000
"""Tokens of device memory here: 10,000 blocks of 16."""


def system_on(prefill: int, decode: int) -> tuple[StillCluster, Llumnix]:
    cluster, system = StillCluster(prefill, decode), Llumnix()
    for node in cluster.nodes.values():
        node.l1_tokens = MEMORY
    system.begin(cluster, 0.0)
    return cluster, system


def test_remaining_steps_are_blocks_a_request() -> None:
    assert steps(MEMORY, 0, 10) == 1_000
    assert steps(MEMORY, 96_000, 10) == 400
    assert steps(MEMORY, 0, 0) == inf
    assert steps(1_600, 3_200, 10) == -10, "those that wait owe more than is free"


def test_prefill_goes_to_the_longest_prefix_among_instances_that_are_not_busy() -> None:
    cluster, system = system_on(3, 1)
    request = call(64_000)
    cluster["p0"].holds[request.id], cluster["p1"].holds[request.id] = (900, 900), (300, 300)
    cluster["p1"].prefills(1_000)
    assert placed(system.arrived(request, 0.0))[request.id].prefill == "p0"
    cluster["p0"].queues(160_000)
    assert placed(system.arrived(request, 0.0))[request.id].prefill == "p1"
    stranger = call(64_000)
    assert placed(system.arrived(stranger, 0.0))[stranger.id].prefill == "p2", "no prefix: least ratio"
    for node in ("p1", "p2"):
        cluster[node].queues(160_000)
    assert placed(system.arrived(request, 0.0))[request.id].prefill == "p0", "all busy: all count"


def test_decode_goes_where_most_steps_are_left() -> None:
    cluster, system = system_on(1, 3)
    cluster["d0"].decodes(20_000, 20_000)
    cluster["d1"].decodes(100_000)
    cluster["d2"].decodes(10_000, 10_000, 10_000)
    request = call(640)
    assert placed(system.arrived(request, 0.0))[request.id].decode == "d0", "3,750 steps each against 3,750 and 2,708"
    cluster["d0"].waiting_decode_kv = 16_000
    assert placed(system.arrived(request, 0.0))[request.id].decode == "d1"


def test_the_fullest_is_paired_with_the_emptiest_and_sends_its_shortest() -> None:
    cluster, system = system_on(1, 4)
    full = cluster["d0"].decodes(60_000, 20_000, 80_000)
    fuller = cluster["d1"].decodes(90_000, 80_000)
    cluster["d2"].decodes(10_000)
    moves = [action for action in system.wake(0.05) if isinstance(action, Migrate)]
    assert [(move.call.id, move.node) for move in moves] == [(fuller[1].id, "d3"), (full[1].id, "d2")]
    assert not [action for action in system.wake(0.10) if isinstance(action, Migrate)], "one at a time"
    for each, node in ((fuller[1], "d1"), (full[1], "d0")):
        cluster[node].decode_calls.pop(each.id)
        cluster[node].decode_kv -= each.prompt_tokens
        each.decode_node = "d3"
    assert not [action for action in system.wake(0.15) if isinstance(action, Migrate)], "both have room again"


def test_one_pool_gives_when_it_can_spare_and_the_other_wants() -> None:
    cluster, system = system_on(3, 2)
    for node in ("d0", "d1"):
        cluster[node].decodes(80_000, 79_000)
    assert not [action for action in system.wake(5.0) if isinstance(action, Move)], "not before 10 s"
    cluster["p0"].queues(1_000)
    cluster["p1"].queues(1_000)
    moves = [action for action in system.wake(10.0) if isinstance(action, Move)]
    assert moves == [], "31 steps left are above 10"
    for node in ("d0", "d1"):
        cluster[node].waiting_decode_kv = 900
    moves = [action for action in system.wake(20.0) if isinstance(action, Move)]
    assert [(move.node, move.phase) for move in moves] == [("p2", Phase.DECODE)]
    cluster["p2"].moving = True
    assert not [action for action in system.wake(30.0) if isinstance(action, Move)]
