"""Session affinity and Model Gateway's policies, with the gateway's own numbers."""

import pytest

from services.simulator.systems.smg_cache_aware import SmgCacheAware
from services.simulator.systems.smg_least_load import SmgLeastLoad, score
from services.simulator.systems.sticky import Sticky
from tests.system_stage import StillCluster, call, placed


def test_a_session_keeps_the_node_it_drew_sub_agents_with_it() -> None:
    cluster, system = StillCluster(4, 2, draws=[0.6, 0.1]), Sticky()
    system.begin(cluster, 0.0)
    main, child, other = call(agent="a", branch="a:main"), call(agent="a", branch="a:child"), call(agent="b")
    assert placed(system.arrived(main, 0.0))[main.id].prefill == "p2"
    cluster["p2"].queues(*[100_000] * 50)
    assert placed(system.arrived(child, 1.0))[child.id].prefill == "p2"
    assert placed(system.arrived(other, 2.0))[other.id].prefill == "p0"


def test_a_session_whose_node_is_gone_draws_again() -> None:
    cluster, system = StillCluster(2, 1, draws=[0.9, 0.0]), Sticky()
    system.begin(cluster, 0.0)
    first, second = call(agent="a"), call(agent="a")
    assert placed(system.arrived(first, 0.0))[first.id].prefill == "p1"
    cluster["p1"].phase = None
    assert placed(system.arrived(second, 1.0))[second.id].prefill == "p0"


def test_decode_goes_round() -> None:
    cluster, system = StillCluster(1, 3), Sticky()
    system.begin(cluster, 0.0)
    calls = [call() for _ in range(6)]
    nodes = [placed(system.arrived(each, 0.0))[each.id].decode for each in calls]
    assert sorted(nodes) == ["d0", "d0", "d1", "d1", "d2", "d2"]
    assert nodes[:3] == nodes[3:]


@pytest.mark.parametrize(
    ("loads", "chosen"),
    [
        ((64, 0), "p0"),  # a gap of 64 is not above 64
        ((65, 0), "p1"),
        ((300, 201), "p0"),  # 300 is not above 1.5 x 201
        ((302, 201), "p1"),
    ],
)
def test_affinity_wins_until_counts_are_out_of_balance(loads: tuple[int, int], chosen: str) -> None:
    cluster, system = StillCluster(2, 1), SmgCacheAware()
    system.begin(cluster, 0.0)
    request = call(6_400)
    cluster["p0"].holds[request.id] = (0, 1)
    for node, load in zip(("p0", "p1"), loads, strict=True):
        cluster[node].queues(*[64] * load)
    assert placed(system.arrived(request, 0.0))[request.id].prefill == chosen


def test_most_overlap_then_fewest_in_flight_then_smaller_tree() -> None:
    cluster, system = StillCluster(3, 1), SmgCacheAware()
    system.begin(cluster, 0.0)
    request = call(6_400)
    cluster["p0"].holds[request.id] = (0, 40)
    cluster["p1"].holds[request.id] = (60, 60)
    cluster["p2"].holds[request.id] = (0, 60)
    cluster["p1"].queues(64)
    assert placed(system.arrived(request, 0.0))[request.id].prefill == "p2"
    cluster["p2"].queues(64)
    cluster["p1"].l2_used_tokens, cluster["p2"].l2_used_tokens = 5, 6
    assert placed(system.arrived(request, 0.0))[request.id].prefill == "p1"
    stranger = call(6_400)
    assert placed(system.arrived(stranger, 0.0))[stranger.id].prefill == "p0", "no overlap: fewest in flight"


def test_score_is_time_to_drain_and_pressure() -> None:
    assert score(10_000, 0, 0.0) == pytest.approx(5.0)
    assert score(1_000, 0, 0.0) == pytest.approx(0.5)
    assert score(0, 4_000, 0.0) == pytest.approx(2.0)
    assert score(0, 0, 0.98) == pytest.approx(0.15 * 49)
    assert score(0, 0, 1.7) == pytest.approx(0.15 * 999), "usage is taken as 0.999 at most"


def test_what_was_sent_counts_until_the_next_poll() -> None:
    cluster, system = StillCluster(2, 1), SmgLeastLoad()
    system.begin(cluster, 0.0)
    cluster["p1"].queued_uncached = 5_000
    assert system.next_wake(0.0) == 0.0
    system.wake(0.0)
    first, second, third = call(20_000), call(1_000), call(20_000)
    assert placed(system.arrived(first, 1.0))[first.id].prefill == "p0"
    assert placed(system.arrived(second, 2.0))[second.id].prefill == "p1", "10 s were sent to p0, 2.5 s wait on p1"
    cluster["p1"].queued_uncached = 0
    assert placed(system.arrived(third, 3.0))[third.id].prefill == "p1"
    assert system.next_wake(3.0) == 10.0
    cluster["p0"].queued_uncached = 30_000
    system.wake(10.0)
    assert placed(system.arrived(first, 11.0))[first.id].prefill == "p1"
