"""What the bench of loading concludes from its rows."""

import math

import pytest

from bench.fetch import PAIRS, difference
from services.simulator.record import Sample
from services.simulator.report import prefill_use
from services.simulator.systems.catalogue import SYSTEMS as KNOWN


def sample(at: float, prefill_nodes: int, prefill_s: float, preloaded_tokens: int = 0) -> Sample:
    return Sample(at, "", prefill_nodes, 0, 0, 0, prefill_s, preloaded_tokens)


def test_idle_share_is_of_the_time_that_nodes_were_for_prefill() -> None:
    samples = [sample(0, 9, 0), sample(10, 4, 20, 500), sample(20, 2, 50, 700), sample(30, 2, 65, 900)]
    assert prefill_use(samples, 10, 31) == {"prefill_idle_pct": pytest.approx(25.0), "brought_ahead_tokens": 400}
    assert math.isnan(prefill_use(samples, 30, 31)["prefill_idle_pct"])


def test_loading_while_waiting_is_held_against_its_own_base() -> None:
    start = {"throughput_rps": 4.0, "ttft_mean_s": 10.0, "prefill_idle_pct": 20.0}
    waiting = {"throughput_rps": 5.0, "ttft_mean_s": 8.0, "prefill_idle_pct": 12.0}
    found = difference(start, waiting)
    assert found == {
        "throughput_pct": pytest.approx(25.0),
        "ttft_mean_pct": pytest.approx(-20.0),
        "prefill_idle_points": pytest.approx(-8.0),
    }


def test_each_side_of_a_pair_is_a_known_system() -> None:
    assert {system for pair in PAIRS for system in pair.sides} <= set(KNOWN)
