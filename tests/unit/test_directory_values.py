"""What a directory says of the worth of copies: nothing while they fit, and what goes first when they do not."""

import pytest

from schemas.branch import BranchEventType
from schemas.kv import NEUTRAL, Capacities
from schemas.kv import keys_of as unpack
from services.directory.core.effects import ValuesChanged
from services.directory.core.waits import EDGES_S, WaitKind, Waits
from services.directory.core.worth import AWAKE, LEAST
from tests.directory_checkpoint import put_back, taken
from tests.unit.directory_bench import Bench, chain, hello, stored

SYSTEM = "s"
A, B, C = (chain(*SYSTEM, *(f"{name}{i}" for i in range(4))) for name in "abc")


def worth(bench: Bench, keys: list[int], *, referenced: bool = True) -> list[int]:
    """The values last said of these blocks; NEUTRAL where nothing was."""
    said: dict[int, int] = {}
    for effect in bench.effects:
        if isinstance(effect, ValuesChanged) and effect.referenced == referenced:
            said |= dict.fromkeys(unpack(effect.keys).tolist(), effect.value)
    return [said.get(key, NEUTRAL) for key in keys]


def world(capacity_blocks: int, **config: float) -> Bench:
    bench = Bench(depth_doubling_tokens=10**9, **config)
    room = Capacities(l1_tokens=0, l2_tokens=16 * capacity_blocks)
    bench.done(bench.core.on_hello(hello("p1", capacities=room), 0.0))
    bench.snapshot("p1", 0, stored(A), stored(B), stored(C))
    return bench


def request(bench: Bench, branch: str, keys: list[int], number: int = 0, **fields: object) -> None:
    """One request from match to answer, 10 s later."""
    name = f"{branch}-{number}"
    bench.match(keys, branch=branch, request=name)
    bench.tick(10.0)
    bench.say("p1", 0)
    bench.answered(branch, keys, request=name, **fields)


@pytest.fixture
def scarce() -> Bench:
    return world(14, node_timeout_s=1e9)


def test_while_claimed_blocks_fit_nothing_is_said_of_them() -> None:
    bench = world(100, node_timeout_s=1e9)
    for branch, keys in (("a", A), ("b", B), ("c", C)):
        request(bench, branch, keys)
    bench.tick(1.0)
    assert worth(bench, A + B + C) == [NEUTRAL] * 15


def test_where_they_fill_the_node_shared_blocks_are_worth_more_than_any_of_one_branch(scarce: Bench) -> None:
    for branch, keys in (("a", A), ("b", B), ("c", C)):
        request(scarce, branch, keys)
    scarce.tick(1.0)
    values = worth(scarce, A)
    assert 0 < values[1] == values[4] < values[0]


def test_the_longest_away_is_worth_least_where_nothing_is_known(scarce: Bench) -> None:
    for branch, keys in (("a", A), ("b", B), ("c", C)):
        request(scarce, branch, keys)
    scarce.tick(1.0)
    assert worth(scarce, A)[1] < worth(scarce, B)[1] < worth(scarce, C)[1]


def test_a_branch_whose_request_is_under_way_is_worth_most_until_it_is_answered_or_released(scarce: Bench) -> None:
    for branch, keys in (("a", A), ("b", B), ("c", C)):
        request(scarce, branch, keys)
    scarce.tick(1.0)
    scarce.match(A, branch="a", request="later")
    scarce.tick(0.1)
    assert worth(scarce, A) == [AWAKE] * 5
    scarce.match(A, request="later", release=True)
    scarce.tick(0.1)
    assert AWAKE not in worth(scarce, A)


def test_a_sleeper_outlives_what_a_compaction_is_about_to_leave(scarce: Bench) -> None:
    for branch, keys in (("a", A), ("b", B), ("c", C)):
        request(scarce, branch, keys)
    scarce.tick(359.0)
    scarce.match(chain(*SYSTEM, "summary"), branch="c", request="compaction", version=1)
    scarce.tick(0.1)
    assert worth(scarce, C)[1:] == [LEAST] * 4
    assert min(worth(scarce, A)) > LEAST
    scarce.answered("c", chain(*SYSTEM, "summary"), request="compaction", version=1)
    assert not any(referenced for referenced, _ in map(scarce.bits("p1").get, C[1:]))
    assert max(worth(scarce, C, referenced=False)[1:]) < NEUTRAL


def test_of_blocks_that_nobody_claims_those_that_several_branches_passed_are_worth_more(scarce: Bench) -> None:
    for branch, keys in (("a", A), ("b", B), ("c", C)):
        request(scarce, branch, keys)
    for branch in "abc":
        scarce.tell(branch, BranchEventType.END)
    shared, *own = worth(scarce, A, referenced=False)
    assert max(own) < shared < NEUTRAL


def test_starts_of_contexts_that_are_claimed_again_and_again_come_to_be_worth_more_than_their_ends(
    scarce: Bench,
) -> None:
    for number in range(12):
        keys = chain(*SYSTEM, *(f"{number}.{i}" for i in range(4)))
        scarce.say("p1", number + 1, stored(keys))
        request(scarce, f"agent{number}", keys)
        scarce.tell(f"agent{number}", BranchEventType.END)
        scarce.tick(60.0)
    start, *rest = worth(scarce, keys, referenced=False)
    assert max(rest) < start


def test_a_kind_of_wait_that_always_takes_a_minute_is_worth_most_just_before_it_is_over() -> None:
    waits, minute, short = Waits(), WaitKind("stop", children=False, pace=6), WaitKind("", children=False, pace=1)
    for _ in range(200):
        waits.returned(minute, 60.0)
        waits.returned(short, 2.0)
    waits.refit()
    young, due, late = (waits.rates(minute)[next(i for i, e in enumerate(EDGES_S) if e > at) - 1] for at in (1, 59, 90))
    assert late < young < due
    assert waits.rates(short)[0] > young


def test_more_observations_than_are_remembered_count_half_as_they_age() -> None:
    waits, kind = Waits(), WaitKind("", children=False, pace=1)
    for _ in range(5000):
        waits.returned(kind, 2.0)
    for _ in range(5000):
        waits.returned(kind, 200.0)
    waits.refit()
    assert waits.rates(kind)[1] < 0.2, "the former habit still counts in full"
    waits.check()


def test_with_unfinished_branches_of_its_own_a_branch_waits_in_another_way(scarce: Bench) -> None:
    request(scarce, "a", A)
    request(scarce, "b", B, parent="a")
    followed = scarce.core.values.sleepers
    branch = scarce.core.branches.get(("", "a"))
    assert branch is not None
    parent = followed.get(branch)
    assert parent is not None
    assert parent.kind.children
    scarce.tell("b", BranchEventType.END)
    assert not parent.kind.children


def test_after_a_restart_waits_go_on_from_the_last_activity(scarce: Bench) -> None:
    request(scarce, "a", A)
    scarce.tick(50.0)
    saved = taken(scarce.core, scarce.now, wall=1000.0)
    again = Bench(depth_doubling_tokens=10**9)
    again.now = 7.0
    put_back(again.core, saved, again.now, wall=1010.0)
    again.core.check()
    branch = again.core.branches.get(("", "a"))
    assert branch is not None
    sleeper = again.core.values.sleepers.get(branch)
    assert sleeper is not None
    assert again.now - sleeper.since == 60.0
