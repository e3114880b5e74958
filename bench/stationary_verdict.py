"""What must hold of the nine stationary runs, row by row: ours against every other system of the same run.

A ratio over a baseline is claimed only where that baseline, simulated, comes within 15 % of the throughput that the
reference reported for it.
"""

from collections.abc import Sequence
from typing import Any

from bench.stationary_reported import AGREES, SYSTEMS

BASELINE = "dynamo-1.5.1"
BEHIND_PCT = {"putnam": 5.0}
"""Throughput that may be given for P95 TTFT; elsewhere 1 %."""
TTFT_RATIO = {
    ("claude-code", 90): 13.9,
    ("claude-code", 126): 10.6,
    "claude-code": 3.25,
    "osworld": 3.25,
    "putnam": 1.0,
}


def verdicts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One per workload and concurrency of which `rows` has `ours` and the baseline; figures are means over seeds."""
    found = []
    for workload, agents in dict.fromkeys((row["workload"], row["agents"]) for row in rows):
        of = {
            system: _mean([r for r in rows if (r["workload"], r["agents"], r["system"]) == (workload, agents, system)])
            for system in dict.fromkeys(row["system"] for row in rows)
        }
        if of.get("ours") and of.get(BASELINE):
            found.append(_verdict(workload, agents, {name: row for name, row in of.items() if row}))
    return found


def _mean(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    keys = ("throughput_rps", "e2e_mean_s", "lost_reuse_pct", "ttft_p95_s", "switches")
    return {key: sum(row[key] for row in rows) / len(rows) for key in keys} if rows else {}


def _verdict(workload: str, agents: int, of: dict[str, dict[str, float]]) -> dict[str, Any]:
    ours, theirs = of["ours"], of[BASELINE]
    said, reference = SYSTEMS[workload, agents, BASELINE], SYSTEMS[workload, agents, "reference"]
    assert None not in (*said[:3], *reference[:3])
    agrees = theirs["throughput_rps"] / said.throughput_rps
    wanted_ttft = TTFT_RATIO.get((workload, agents), TTFT_RATIO[workload])
    checks = {
        "throughput": (
            ours["throughput_rps"] / theirs["throughput_rps"],
            reference.throughput_rps / said.throughput_rps,
        ),
        "e2e": (theirs["e2e_mean_s"] / ours["e2e_mean_s"], said.e2e_mean_s / reference.e2e_mean_s),
        "lost_reuse": (
            theirs["lost_reuse_pct"] / max(ours["lost_reuse_pct"], 1e-3),
            said.lost_reuse_pct / reference.lost_reuse_pct,
        ),
        "ttft_p95": (theirs["ttft_p95_s"] / ours["ttft_p95_s"], wanted_ttft),
    }
    others = {
        name: {
            "throughput_pct": 100 * (ours["throughput_rps"] / row["throughput_rps"] - 1),
            "e2e_ratio": row["e2e_mean_s"] / ours["e2e_mean_s"],
        }
        for name, row in of.items()
        if name not in ("ours", BASELINE)
    }
    behind = BEHIND_PCT.get(workload, 1.0)
    return {
        "workload": workload,
        "agents": agents,
        "baseline_over_reported": agrees,
        "claimed": abs(agrees - 1) <= AGREES,
        "ratios": {
            name: {"simulated": got, "wanted": wanted, "met": got >= wanted} for name, (got, wanted) in checks.items()
        },
        "others": others,
        "behind": sorted(name for name, row in others.items() if row["throughput_pct"] < -behind),
        "slower": sorted(name for name, row in others.items() if row["e2e_ratio"] < 1),
        "switches": ours["switches"],
    }


def show(found: Sequence[dict[str, Any]]) -> None:
    """A line per row, and one per system that is ahead of ours."""
    names = ("throughput", "e2e", "lost_reuse", "ttft_p95")
    print(f"\nours over {BASELINE}, simulated (wanted)")
    print(f"{'workload':12}{'agents':>7}{'baseline/reported':>19}" + "".join(f"{name:>18}" for name in names))
    for row in found:
        cells = []
        for name in names:
            ratio = row["ratios"][name]
            cells.append(f"{ratio['simulated']:.2f} ({ratio['wanted']:.2f}){'' if ratio['met'] else ' MISSED'}")
        claim = f"{row['baseline_over_reported']:.2f}{'' if row['claimed'] else ' not claimed'}"
        print(f"{row['workload']:12}{row['agents']:7}{claim:>19}" + "".join(f"{cell:>18}" for cell in cells))
        for name in sorted({*row["behind"], *row["slower"]}):
            other = row["others"][name]
            gain, slower = other["throughput_pct"], other["e2e_ratio"]
            print(f"{'':20}{name}: throughput {gain:+.1f} %, its mean E2E {slower:.2f}x ours")
    if found:
        print(f"switches a run of ours: {sum(row['switches'] for row in found) / len(found):.1f} (at most 2.0)")
