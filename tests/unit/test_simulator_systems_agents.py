"""ThunderAgent's pausing and resuming."""

from collections import deque
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from services.simulator.call import Call
from services.simulator.systems.thunderagent import Program, ThunderAgent, resumable, to_pause
from tests.system_stage import StillCluster, call, placed


def program(name: str, tokens: int, *, reasoning: bool = True, steps: int = 5) -> Program:
    return Program(name, tokens=tokens, reasoning=reasoning, steps=steps)


def names(programs: list[Program]) -> list[str]:
    return [each.id for each in programs]


def test_acting_programs_are_paused_smallest_first_then_reasoning_ones_marked() -> None:
    small, large = program("small", 900, reasoning=False), program("large", 5_900, reasoning=False)
    busy, busier = program("busy", 100), program("busier", 200)
    everybody = [large, busier, small, busy]
    assert to_pause(everybody, 0) == ([], [])
    assert names(to_pause(everybody, 1_000)[0]) == ["small"]
    now, later = to_pause(everybody, 1_001)
    assert names(now) == ["small", "large"]
    assert later == []
    now, later = to_pause(everybody, 7_100)
    assert names(later) == ["busy"]


def test_resume_prefers_reasoning_then_new_then_acting_each_by_size() -> None:
    acting, new = program("acting", 1_000, reasoning=False), program("new", 2_000, steps=1)
    short, long = program("short", 3_000), program("long", 9_900)
    everybody = [acting, new, long, short]
    assert names(resumable(everybody, 3_100)) == ["short"]
    assert names(resumable(everybody, 13_100)) == ["long", "short"], "placed by descending size"
    assert names(resumable(everybody, 12_000)) == ["short", "new", "acting"], "what does not fit is passed over"


def system_on(prefill: int, capacity: int) -> tuple[StillCluster, ThunderAgent]:
    cluster, system = StillCluster(prefill, 1), ThunderAgent()
    for node in cluster.nodes.values():
        node.l1_tokens, node.l2_tokens = capacity // 2, capacity // 2
    system.begin(cluster, 0.0)
    return cluster, system


def test_a_program_stays_where_it_was_placed_first() -> None:
    cluster, system = system_on(2, 1_000_000)
    first, other, second = call(64_000, branch="a"), call(1_000, branch="b"), call(64_000, branch="a")
    assert placed(system.arrived(first, 0.0))[first.id].prefill == "p0"
    assert placed(system.arrived(other, 0.0))[other.id].prefill == "p1", "fewest tokens promised"
    system.ended(first, 1.0)
    cluster["p0"].queues(*[100_000] * 9)
    assert placed(system.arrived(second, 2.0))[second.id].prefill == "p0"


def test_what_does_not_fit_waits_for_a_tick_with_room() -> None:
    _, system = system_on(1, 100_000)
    first, second, third = call(64_000, branch="a"), call(40_000, branch="b"), call(640, branch="c")
    assert placed(system.arrived(first, 0.0))
    assert not system.arrived(second, 1.0)
    assert not system.arrived(third, 1.0), "behind those that wait, though it would fit"
    assert list(placed(system.wake(5.0))) == [third.id]
    first.last = True
    system.ended(first, 6.0)
    assert list(placed(system.wake(10.0))) == [second.id]


def test_an_overfull_backend_pauses_who_acts_until_there_is_room() -> None:
    _, system = system_on(1, 100_000)
    calls = [call(45_000, branch=name) for name in "ab"]
    for each in calls:
        assert placed(system.arrived(each, 0.0))
    calls[0].output_tokens = 20_000
    system.ended(calls[0], 1.0)
    system.wake(5.0)
    assert system.pauses == 1, "65,100 + 45,100 are above 100,000; only a acts"
    following = call(66_000, branch="a")
    assert not system.arrived(following, 6.0)
    assert not system.wake(10.0)
    calls[1].last = True
    system.ended(calls[1], 11.0)
    assert list(placed(system.wake(15.0))) == [following.id]


def test_nobody_is_paused_for_more_than_half_an_hour() -> None:
    _, system = system_on(1, 100_000)
    first, second = call(64_000, branch="a"), call(64_000, branch="b")
    assert placed(system.arrived(first, 0.0))
    assert not system.arrived(second, 1.0)
    assert not system.wake(1_800.0)
    assert list(placed(system.wake(1_801.0))) == [second.id]


@given(st.integers(0, 1 << 30))
def test_every_held_request_is_sent_once_others_end(seed: int) -> None:
    """Placements never exceed a backend, and nobody is forgotten or sent twice."""
    random = Random(seed)
    _, system = system_on(2, 200_000)
    running: deque[Call] = deque()
    sent: set[str] = set()
    asked: set[str] = set()
    now = 0.0
    for step in range(60):
        now += random.uniform(0.0, 6.0)
        if step < 30 and random.random() < 0.7:
            new = call(random.randint(1_000, 90_000), branch=f"b{step}", last=True)
            asked.add(new.id)
            fresh = placed(system.arrived(new, now))
        else:
            if running:
                system.ended(running.popleft(), now)
            fresh = placed(system.wake(now))
        assert not sent & fresh.keys()
        sent |= fresh.keys()
        running.extend(place.call for place in fresh.values())
        by_node: dict[str, int] = {}
        for each in running:
            by_node[each.branch] = each.prompt_tokens
        assert sum(by_node.values()) <= 2 * 200_000
    while running:
        now += 5.0
        system.ended(running.popleft(), now)
        fresh = placed(system.wake(now))
        sent |= fresh.keys()
        running.extend(place.call for place in fresh.values())
    assert sent == asked
    assert system.programs == {}
