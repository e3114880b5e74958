"""What the simulated benches conclude from their rows."""

from typing import Any

import pytest

from bench.openloop import missed, reverts_s, sustained
from bench.shift import windows, worst_window
from bench.starts import apart_pct, interval
from bench.stationary_runs import Job
from bench.systems import CASES, compare
from services.simulator.systems.catalogue import SYSTEMS


def test_a_rate_is_sustained_with_all_lower_ones() -> None:
    assert sustained({0.5: 3.0, 0.75: 12.0, 1.0: 15.0, 1.25: 40.0}) == 1.0
    assert sustained({0.5: 3.0, 0.75: 17.8, 1.0: 12.3}) == 0.5
    assert sustained({0.5: 22.0, 0.75: 3.0}) == 0.0
    assert sustained({0.5: float("nan"), 0.75: 3.0}) == 0.0


def test_missed_by_a_switch_is_what_the_fixed_split_meets() -> None:
    ours = {0.5: 3.0, 0.75: 17.8, 1.0: 12.3, 1.25: 30.0}
    assert missed(ours, {0.5: 2.0, 0.75: 4.0, 1.0: 9.0, 1.25: 20.0}) == [0.75]
    assert missed(ours, {0.5: 2.0, 0.75: 16.0, 1.0: 9.0, 1.25: 20.0}) == []


def test_a_revert_is_timed_from_the_order_it_undoes() -> None:
    said = [
        {"at_s": 600.0, "kind": "window", "to": None},
        {"at_s": 1200.0, "kind": "window", "to": "2P7D"},
        {"at_s": 1222.0, "kind": "revert", "to": "3P6D"},
        {"at_s": 1800.0, "kind": "window", "to": "4P5D"},
    ]
    assert reverts_s(said) == [22.0]


def result(*rates: float) -> dict[str, Any]:
    return {"timeline": [{"at_s": 60.0 * minute, "throughput_rps": rate} for minute, rate in enumerate(rates)]}


def test_each_window_is_held_against_its_own_best_split() -> None:
    few, many = result(9, 1, 1, 4, 4), result(9, 3, 3, 2, 2)
    assert windows(few, 60.0, 120.0) == [1.0, 4.0]
    assert worst_window(result(9, 3, 3, 3, 3), [few, many], 60.0, 120.0) == pytest.approx(0.75)
    assert windows(result(9, 1, 1, 4), 60.0, 120.0) == [1.0], "a window that is cut off says nothing"


def test_agents_or_a_rate_replace_those_of_the_scenario() -> None:
    assert Job("claude-code", "static", 90).resolved().work[0].agents == 90
    at_rate = Job("open-loop", "static", None, per_minute=0.5).resolved().work[0]
    assert (at_rate.agents, at_rate.per_minute) == (0, 0.5)
    shift = Job("shift", "static", None).resolved()
    assert [work.agents for work in shift.work] == [288, 0]
    assert [end - start for start, end in shift.periods_s] == [3600.0] * 3


def test_every_case_names_a_known_system_and_figures_beyond_15_percent_differ() -> None:
    assert {case.system for case in CASES} <= set(SYSTEMS)
    case = next(case for case in CASES if case.system == "arrow")
    near = {"throughput_rps": 1.9, "lost_reuse_pct": 50.0, "switches": 20}
    assert compare(case, near)["agrees"] is True
    assert compare(case, near | {"throughput_rps": 2.0})["agrees"] is False
    assert compare(CASES[-1], {"throughput_rps": 1.0})["agrees"] is None


def test_how_far_starts_lie_apart_and_what_adapting_costs() -> None:
    assert apart_pct([8.2, 8.0, 8.3]) == pytest.approx(3.75)
    mean, low, high = interval([0.25, -0.54, -0.10, 1.36, -0.17])
    assert (mean, low, high) == pytest.approx((0.16, -0.744, 1.064), abs=2e-3)
