"""What the bench of other hardware concludes from its rows."""

import pytest

from bench.hardware import FREE, HARDWARE, SYSTEMS, agents_on, by_seed, changes, in_iterations_s, used_pct
from services.simulator.hardware import FREE_LOADS, PROFILES
from services.simulator.systems.catalogue import SYSTEMS as KNOWN

ROW = {"throughput_rps": 5.0, "ttft_mean_s": 2.0, "ttft_p95_s": 8.0, "e2e_mean_s": 10.0}


def test_every_run_is_of_a_known_system_on_known_hardware() -> None:
    assert set(SYSTEMS) <= set(KNOWN)
    assert {profile + free for profile in HARDWARE for free in ("", FREE_LOADS)} <= set(PROFILES)


def test_what_loading_costs_iterations_and_how_much_was_used() -> None:
    row = {"restored_tokens_per_request": 100_000, "preloaded_tokens_per_request": 300, "requests": 10}
    assert in_iterations_s(row, "glm-5.2/gb300") == pytest.approx(0.02)
    assert in_iterations_s(row, "glm-5.2/gb300" + FREE_LOADS) == 0.0
    assert used_pct(row | {"brought_ahead_tokens": 12_000}) == pytest.approx(25.0)
    assert used_pct(row | {"brought_ahead_tokens": 0}) is None


def test_each_change_has_its_own_base() -> None:
    rows = {name: dict(ROW) for name in (*SYSTEMS, FREE)}
    rows["static"]["throughput_rps"] = 4.0
    rows["ours-reload"]["ttft_mean_s"] = 1.5
    rows[FREE]["e2e_mean_s"] = 9.0
    found = changes(rows)
    assert found["ours over static"]["throughput_rps"] == pytest.approx(25.0)
    assert found["reload, ours"]["ttft_mean_s"] == pytest.approx(-25.0)
    assert found["free loads, fixed split"]["e2e_mean_s"] == pytest.approx(-10.0)


def test_reload_is_judged_over_pairs_of_one_seed() -> None:
    pairs = [(ROW, ROW | {"throughput_rps": rate}) for rate in (5.5, 4.5, 5.3)]
    found = by_seed(pairs)["throughput_rps"]
    assert found == {"mean": pytest.approx(2.0), "least": pytest.approx(-10.0), "most": pytest.approx(10.0)}


def test_agents_go_by_how_fast_a_node_computes() -> None:
    assert [agents_on(hardware) for hardware in HARDWARE] == [90, 39, 30]
