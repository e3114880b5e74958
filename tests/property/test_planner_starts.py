"""What begins in a slice, by a table of lives, against requests whose lives are known."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.phase import Phase
from schemas.telemetry import LENGTH_CLASSES, Iteration, IterationBatch, RequestTelemetry, length_class
from services.engine.core.answers import by_length
from services.planner.core.demand import Demand
from services.planner.core.starts import LEAST_STARTS, Starts
from services.planner.core.windows import Windows, WindowSettings

lives = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 300)), min_size=1, max_size=60)
"""(when a request begins, how many tokens it gives, one a second)."""


def slice_of(requests: list[tuple[int, int]], first: int, last: int) -> Starts:
    """What a planner sees of the seconds [first, last)."""

    def running(now: int) -> np.ndarray:
        found = np.zeros(LENGTH_CLASSES)
        counts = by_length(now - began for began, tokens in requests if began < now < began + tokens)
        found[: len(counts)] = counts
        return found

    starts = Starts()
    for began, tokens in requests:
        if first < began + tokens <= last:
            starts.end(tokens)
    starts.ran(running(first), running(last))
    starts.check()
    return starts


@given(lives)
def test_from_an_empty_cluster_to_an_empty_one_it_is_the_mean_of_all(requests: list[tuple[int, int]]) -> None:
    starts = slice_of(requests, -1, 400)
    assert starts.reached[0] == len(requests)
    assert starts.output_tokens() == pytest.approx(np.mean([tokens for _, tokens in requests]))


@given(lives, st.lists(st.integers(0, 349), max_size=6))
def test_slices_add_up_to_the_whole(requests: list[tuple[int, int]], cuts: list[int]) -> None:
    ends = sorted({-1, *cuts, 400})
    whole, parts = slice_of(requests, -1, 400), Starts()
    for first, last in itertools.pairwise(ends):
        parts = parts.plus(slice_of(requests, first, last))
    assert parts.reached.tolist() == whole.reached.tolist()
    assert parts.output_tokens() == pytest.approx(whole.output_tokens())


@given(lives, st.integers(0, 300))
def test_those_that_came_to_a_length_are_counted_in_the_slice_in_which_they_did(
    requests: list[tuple[int, int]], first: int
) -> None:
    starts = slice_of(requests, first, first + 60)
    for k in range(10):
        came = sum(tokens >= 2**k and first < began + 2**k <= first + 60 for began, tokens in requests)
        if k:  # those of one token or none are in one class
            assert starts.reached[k] == came, k


def test_when_short_answers_take_the_place_of_long_ones_it_is_told_at_once() -> None:
    long = [(second, 3000) for second in range(-6000, 0, 20)]
    short = [(second, 200) for second in range(0, 600, 20)]
    starts = slice_of(long + short, 240, 300)
    ended = starts.tokens.sum() / starts.ended.sum()
    assert ended > 1500  # one long answer ends for each short one
    assert starts.output_tokens() < 500
    assert starts.reached[0] == pytest.approx(3, abs=1)


def test_an_answer_longer_than_any_that_ended_counts_with_what_it_has() -> None:
    starts = slice_of([(0, 4000), (0, 100)], -1, 3000)
    assert starts.output_tokens() == pytest.approx((100 + 2048) / 2)


def request(number: int, tokens: int, uncached: int, media: int) -> RequestTelemetry:
    return RequestTelemetry(
        id=f"{number}",
        t=1.0,
        request=f"{number}",
        branch=None,
        version=None,
        outcome="stop",
        t_arrive=1.0,
        t_end=2.0,
        uncached_tokens=uncached,
        cached_tokens=1000,
        output_tokens=tokens,
        media=media,
    )


def prefill(uncached: int, pairs: float, media: int) -> IterationBatch:
    one = Iteration(
        t=1.0,
        seq=1,
        phase=Phase.PREFILL,
        duration_s=0.1,
        requests=1,
        uncached_tokens=uncached,
        attention_pairs=pairs,
        media=media,
    )
    return IterationBatch(node="n", incarnation=1, iterations=[one])


def windows(*, by_start: bool) -> Windows:
    """A slice in which 10 long requests end and 30 with pictures begin, after one in which nothing happened."""
    made = Windows(WindowSettings(slice_s=10.0, slices=10), 0.0, by_start=by_start)
    for second in range(20):
        made.advance(float(second))
        made.router_beat("r", float(second))
        made.node_beat("n", 20, 20, float(second), (0,) * 11 + (20,) if second < 10 else (0, 0, 30) + (0,) * 8 + (10,))
        if second == 15:
            for number in range(10):
                made.request(request(number, 3000, 400, 0))
            made.iterations(prefill(60_000, 3e7, 30))
    made.advance(20.0)
    made.check()
    return made


def test_the_work_of_a_slice_is_that_of_those_that_began_in_it() -> None:
    first, second = windows(by_start=True).latest(2)
    assert first.workload is None
    assert second.workload is not None
    assert (second.workload.t_uc, second.workload.attention_pairs, second.workload.media) == (2000, 1e6, 1)
    assert second.workload.t_c == 1000
    assert second.demand is not None
    assert second.demand.each()[4, 4] == 1.0


def test_or_of_those_that_ended_in_it() -> None:
    _, second = windows(by_start=False).latest(2)
    assert second.workload is not None
    assert (second.workload.t_uc, second.workload.media, second.workload.t_out) == (400, 0, 3000)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 9000), st.integers(0, 3)), min_size=1, max_size=30))
def test_where_nodes_do_not_tell_lengths_it_is_the_mean_of_those_that_ended(rows: list[tuple[int, int, int]]) -> None:
    told, plain = Demand(), Demand()
    for number, (tokens, uncached, media) in enumerate(rows):
        for demand in (told, plain):
            demand.add(request(number, tokens, uncached, media), None)
    pairs = float(plain.moments[0, 2])
    told.starts.iterated(sum(row[1] for row in rows), pairs, sum(row[2] for row in rows))
    told.starts.ran(np.zeros(LENGTH_CLASSES), np.zeros(LENGTH_CLASSES))
    assert told.starts.known == (len(rows) >= LEAST_STARTS)
    expected, found = plain.workload(), told.workload()
    assert expected is not None
    assert found is not None
    assert found.t_out == pytest.approx(expected.t_out)
    assert found.t_uc == pytest.approx(expected.t_uc)
    assert told.each() == pytest.approx(plain.each())
    told.check()


@given(st.integers(0, 1 << 40))
def test_a_class_has_the_answers_from_one_power_of_two_to_the_next(tokens: int) -> None:
    k = length_class(tokens)
    assert k == 0 or 2**k <= tokens
    assert tokens < 2 ** (k + 1) or k == LENGTH_CLASSES - 1
    assert by_length([tokens])[k] == 1
    assert sum(by_length([tokens, 1, 0])) == 3


def test_nothing_runs_nothing_is_counted() -> None:
    assert by_length([]) == []
    empty = Starts()
    empty.ran(np.zeros(LENGTH_CLASSES), np.zeros(LENGTH_CLASSES))
    assert not empty.known
