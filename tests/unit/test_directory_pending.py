"""A pending prefix lasts as long as its request: not beyond the answer, the router, or the directory's own duty."""

import random

import pytest
from directory_bench import Bench, chain
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.directory import MatchQuery
from schemas.telemetry import RouterTelemetry

PROMPT = chain(*"0123456789")


def beat(bench: Bench, router: str, incarnation: int) -> None:
    told = RouterTelemetry(router=router, t=0.0, incarnation=incarnation, open_requests=1)
    bench.done(bench.core.on_router(told, bench.now))


def waiting(bench: Bench) -> set[str]:
    """Requests of which an end is still to come, as `ahead` and the worth of sleepers see them."""
    return {f"r{n}" for n in range(10) if bench.core.pending.get(f"r{n}") is not None}


def test_a_match_applied_after_the_answer_leaves_nothing_behind() -> None:
    bench = Bench()
    bench.answered("b", PROMPT[:4], request="r0")
    bench.answered("b", PROMPT[:6], request="r1")
    bench.match(PROMPT, request="r1", branch="b")
    assert waiting(bench) == set()
    branch = bench.core.branches.get(("", "b"))
    assert branch is not None
    sleeper = bench.core.values.sleepers.get(branch)
    assert sleeper is not None
    assert sleeper.requests == 0, "the branch does not wait for an answer that it has"
    assert bench.match(PROMPT, request="r2").pending_request is None


def test_a_request_that_comes_under_the_same_id_again_is_pending_again() -> None:
    bench = Bench()
    bench.core.match(MatchQuery(request="r0", release=True), bench.now)
    bench.match(PROMPT, request="r0")
    assert waiting(bench) == set()
    bench.match(PROMPT, request="r0")
    assert waiting(bench) == {"r0"}


@settings(deadline=None, max_examples=60)
@given(st.randoms(use_true_random=False), st.integers(1, 8))
def test_in_whatever_order_matches_and_ends_come_nothing_stays(rnd: random.Random, requests: int) -> None:
    bench = Bench()
    bench.answered("b", PROMPT[:3])
    said = [(number, end) for number in range(requests) for end in (False, True)]
    rnd.shuffle(said)
    for number, end in said:
        if not end:
            bench.match(PROMPT, request=f"r{number}", branch="b")
        elif number % 2:
            bench.answered("b", PROMPT[:4], request=f"r{number}")
        else:
            bench.core.match(MatchQuery(request=f"r{number}", release=True), bench.now)
    assert len(bench.core.pending) == 0
    branch = bench.core.branches.get(("", "b"))
    assert branch is not None
    sleeper = bench.core.values.sleepers.get(branch)
    assert sleeper is not None
    assert sleeper.requests == 0


def test_a_router_that_falls_silent_takes_its_requests_with_it() -> None:
    bench = Bench(node_timeout_s=3.0)
    bench.match(PROMPT, request="r0", router="one", incarnation=7)
    bench.match(PROMPT, request="r1", router="two", incarnation=8)
    bench.match(PROMPT, request="r2")
    for _ in range(2):
        bench.tick(1.0)
        beat(bench, "one", 7)
        beat(bench, "two", 8)
    for _ in range(3):
        bench.tick(1.0)
        beat(bench, "two", 8)
    assert waiting(bench) == {"r0", "r1", "r2"}, "silent for no more than the timeout"
    bench.tick(1.0)
    assert waiting(bench) == {"r1", "r2"}
    assert bench.match(PROMPT, request="r3").pending_request == "r1"


@pytest.mark.parametrize("by", ["heartbeat", "question"])
def test_a_router_that_began_anew_has_asked_nothing_yet(by: str) -> None:
    bench = Bench()
    bench.match(PROMPT, request="r0", router="one", incarnation=7)
    bench.match(PROMPT, request="r1", router="two", incarnation=7)
    beat(bench, "one", 7)
    assert waiting(bench) == {"r0", "r1"}
    if by == "heartbeat":
        beat(bench, "one", 3)
        assert waiting(bench) == {"r1"}
    bench.match(PROMPT, request="r2", router="one", incarnation=3)
    bench.done([])
    assert waiting(bench) == {"r1", "r2"}
    beat(bench, "one", 3)
    assert waiting(bench) == {"r1", "r2"}


def test_a_directory_that_stands_by_keeps_no_requests() -> None:
    """Whatever becomes of them is told to the one that answers."""
    bench = Bench()
    bench.match(PROMPT, request="r0", router="one", incarnation=7)
    bench.done(bench.core.stand_by())
    assert waiting(bench) == set()
