"""Telemetry windows: known, idle, unknown and switching slices, and the mean work of a request."""

import math

import pytest

from schemas.phase import Phase
from schemas.telemetry import Iteration, IterationBatch, RequestTelemetry
from services.planner.core.windows import Slice, SliceKind, Windows, WindowSettings

SETTINGS = WindowSettings(slice_s=60, slices=10, max_gap_s=5)


def request(t_uc: int = 10, t_c: int = 100, out: int = 5, t_end: float = 1.0) -> RequestTelemetry:
    return RequestTelemetry(
        id="e",
        t=1.0,
        request="r",
        branch=None,
        version=None,
        outcome="ok",
        t_arrive=0.0,
        t_end=t_end,
        prompt_tokens=t_uc + t_c,
        cached_tokens=t_c,
        uncached_tokens=t_uc,
        output_tokens=out,
    )


def decode(requests: int, accepted: int, duration_s: float = 0.02) -> IterationBatch:
    one = Iteration(
        t=0.0, seq=0, phase=Phase.DECODE, duration_s=duration_s, requests=requests, accepted_tokens=accepted
    )
    return IterationBatch(node="n", incarnation=1, iterations=[one])


def beats(windows: Windows, start: float, end: float, decoding: int = 0) -> list[list[Slice]]:
    """A node and a router report every second over [start, end)."""
    done = []
    for second in range(int(start), int(end)):
        done += windows.advance(second)
        windows.node_beat("n", decoding, decoding, second)
        windows.router_beat("r0", second)
        windows.check()
    return done


def test_case_81_no_telemetry_is_unknown_and_zero_requests_are_idle() -> None:
    windows = Windows(SETTINGS, 0.0)
    (unknown,) = windows.advance(600.0)
    assert {one.kind for one in unknown} == {SliceKind.UNKNOWN}
    assert {one.q for one in unknown} == {None}
    done = beats(windows, 600, 1201)
    assert [{one.kind for one in window} for window in done] == [{SliceKind.IDLE}]
    assert {one.q for one in done[0]} == {0.0}


def test_case_81_only_the_record_with_nan_is_rejected() -> None:
    windows = Windows(SETTINGS, 0.0)
    beats(windows, 0, 30)
    windows.request(request(t_end=math.nan))
    windows.request(request(t_uc=20, t_c=40))
    windows.iterations(decode(4, 8, duration_s=math.nan))
    windows.iterations(decode(4, 4))
    beats(windows, 30, 61)
    assert windows.rejected == 2
    workload, _ = windows.recent(61.0)
    assert workload is not None
    assert (workload.t_uc, workload.t_c, workload.t_acc) == (20, 40, 1.0)


def test_the_mean_work_averages_attention_pairs_as_such() -> None:
    windows = Windows(SETTINGS, 0.0)
    beats(windows, 0, 30)
    windows.request(request(t_uc=1, t_c=1000, out=10))
    windows.request(request(t_uc=100, t_c=0, out=30))
    windows.iterations(decode(2, 5))
    workload, _ = windows.recent(30.0)
    assert workload is not None
    assert workload.attention_pairs == pytest.approx((1000 + 1 + 5050) / 2)
    assert (workload.t_uc, workload.t_c, workload.t_out, workload.t_acc) == (50.5, 500, 20, 2.5)


def test_q_is_the_time_mean_over_all_nodes() -> None:
    windows = Windows(SETTINGS, 0.0)
    for second in range(61):
        windows.advance(second)
        windows.node_beat("a", 4 if second < 30 else 0, 6, second)
        windows.node_beat("b", 1, 1, second)
        windows.router_beat("r0", second)
    _, q = windows.recent(61.0)
    assert q == pytest.approx(3.0, abs=0.05)
    (closed,) = windows.latest(1)
    assert closed.in_flight == pytest.approx(7.0, abs=0.15)


def test_a_silent_node_makes_its_slice_unknown_and_a_gone_one_only_that_slice() -> None:
    windows = Windows(WindowSettings(slice_s=60, slices=3, max_gap_s=5), 0.0)
    done = []
    for second in range(181):
        done += windows.advance(second)
        windows.node_beat("a", 0, 0, second)
        windows.router_beat("r0", second)
        if second < 70:
            windows.node_beat("b", 0, 0, second)
        if second == 73:
            windows.forget("b")
    (window,) = done
    assert [one.kind for one in window] == [SliceKind.IDLE, SliceKind.UNKNOWN, SliceKind.IDLE]


def test_without_a_router_requests_are_unknown() -> None:
    windows = Windows(WindowSettings(slice_s=60, slices=1, max_gap_s=5), 0.0)
    for second in range(60):
        windows.node_beat("a", 0, 0, second)
    ((one,),) = windows.advance(60.0)
    assert one.kind is SliceKind.UNKNOWN


def test_slices_that_overlap_a_switch_are_left_out() -> None:
    windows = Windows(WindowSettings(slice_s=60, slices=4, max_gap_s=5), 0.0)
    done = beats(windows, 0, 59)
    windows.switching(active=True)
    done += beats(windows, 59, 61)
    windows.switching(active=False)
    done += beats(windows, 61, 241)
    (window,) = done
    assert [one.kind for one in window] == ["switching", "switching", "idle", "idle"]
    assert window[0].q is None
