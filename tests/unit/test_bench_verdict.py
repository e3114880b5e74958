"""The verdict over stationary runs: what is claimed, what is missed, who is ahead."""

from typing import Any

from bench.stationary_verdict import verdicts


def row(system: str, rps: float, e2e: float, lost: float = 1.0, ttft: float = 10.0) -> dict[str, Any]:
    figures = {"throughput_rps": rps, "e2e_mean_s": e2e, "lost_reuse_pct": lost, "ttft_p95_s": ttft, "switches": 2}
    return {"workload": "claude-code", "agents": 126, "system": system, **figures}


def test_a_ratio_is_claimed_only_over_a_baseline_that_is_as_it_was_reported() -> None:
    fast = [row("ours", 6.5, 9.0, 0.1, 5.0), row("dynamo-1.5.1", 4.5, 20.0, 4.0, 60.0)]
    true = [row("ours", 6.5, 9.0, 0.1, 5.0), row("dynamo-1.5.1", 2.2, 50.0, 8.0, 220.0)]
    assert not verdicts(fast)[0]["claimed"]
    found = verdicts(true)[0]
    assert found["claimed"]
    assert all(ratio["met"] for ratio in found["ratios"].values())


def test_who_is_ahead_is_named() -> None:
    rows = [
        row("ours", 6.0, 9.0),
        row("dynamo-1.5.1", 2.2, 50.0),
        row("static-own", 6.1, 8.0),
        row("static", 5.0, 12.0),
    ]
    found = verdicts(rows)[0]
    assert found["behind"] == ["static-own"]
    assert found["slower"] == ["static-own"]


def test_seeds_are_averaged_and_rows_without_a_baseline_left_out() -> None:
    rows = [row("ours", 6.0, 9.0), row("ours", 4.4, 9.0), row("dynamo-1.5.1", 2.6, 50.0)]
    assert verdicts(rows)[0]["ratios"]["throughput"]["simulated"] == 2.0
    assert verdicts(rows[:2]) == []
