"""A workload that shifts twice, in the simulator: `python -m bench.shift [--quick] [--json FILE]`.

Three hours on Kimi K2.6: Putnam, Putnam with OSWorld, OSWorld (bench/scenarios/shift.toml), start 6P3D. Ours, the
reference's rules and Dynamo 1.5.1 beside every static split of plain SGLang and of our engines. In every 10-minute
window ours is held against the split that was best in that window on our own engines.
`--quick`: five minutes of each, windows of five minutes, two static splits. Traces: EI_TRACES names their folder.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.stationary import NODES, trimmed
from bench.stationary_runs import CORES, Job, run_all

WINDOW_S, QUICK_WINDOW_S = 600.0, 300.0
PERIODS = ("putnam", "putnam+osworld", "osworld")
REPORTED = {
    "dynamo-1.5.1": (1.57, 2.21, 2.05, 1.94, 83.1),
    "static": (3.02, 3.64, 3.10, 3.25, 51.5),
    "reference": (4.05, 3.99, 4.43, 4.16, 38.7),
}
"""Requests per second in each period and in all, and mean E2E of the whole run, as the reference reported them."""


def windows(result: dict[str, Any], since: float, window_s: float) -> list[float]:
    """Requests per second of each whole window from `since` on."""
    sums: dict[int, list[float]] = {}
    for row in result["timeline"]:
        if row["at_s"] >= since:
            sums.setdefault(int((row["at_s"] - since) // window_s), []).append(row["throughput_rps"])
    per_window = window_s / 60.0
    return [sum(values) / per_window for _, values in sorted(sums.items()) if len(values) >= per_window]


def worst_window(ours: dict[str, Any], statics: Sequence[dict[str, Any]], since: float, window_s: float) -> float:
    """The smallest ratio of ours to the best static split of the same window."""
    best = [max(rates) for rates in zip(*(windows(each, since, window_s) for each in statics), strict=True)]
    return min(mine / most for mine, most in zip(windows(ours, since, window_s), best, strict=True) if most > 0)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.shift", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--systems", default="ours,reference,dynamo-1.5.1")
    parser.add_argument("--workers", type=int, default=CORES)
    options = parser.parse_args(argv)
    scenario = "shift-quick" if options.quick else "shift"
    splits = ("5P4D", "7P2D") if options.quick else [f"{n}P{NODES - n}D" for n in range(1, NODES)]
    movers = ["ours"] if options.quick else options.systems.split(",")
    window_s = QUICK_WINDOW_S if options.quick else WINDOW_S
    jobs = [Job(scenario, system, None) for system in movers]
    jobs += [Job(scenario, system, None, 1, split) for system in ("static", "static-own") for split in splits]
    results = run_all(jobs, options.workers)
    since = jobs[0].resolved().warm_up_s
    rows: list[dict[str, Any]] = []
    print(
        f"{'system':14}{'start':6}"
        + "".join(f"{name:>16}" for name in (*PERIODS, "all"))
        + f"{'E2E s':>8}{'P95 TTFT':>10}{'sw':>4}  ends"
    )
    for result in results:
        rates = [*(period["throughput_rps"] for period in result["periods"]), result["throughput_rps"]]
        shown = "".join(f"{rate:16.2f}" for rate in rates)
        print(
            f"{result['system']:14}{result['start']:6}{shown}{result['e2e_mean_s']:8.1f}{result['ttft_p95_s']:10.1f}"
            f"{result['switches']:4}  {result['split']}"
        )
        for name, period in zip(PERIODS, result["periods"], strict=True):
            rows.append({**trimmed(result), **{k: period[k] for k in period if k in trimmed(result)}, "period": name})
        rows.append({**trimmed(result), "period": "all"})
    ours = next((result for result in results if result["system"] == "ours"), None)
    best = {
        system: max((r for r in results if r["system"] == system), key=lambda r: float(r["throughput_rps"]))
        for system in ("static", "static-own")
    }
    for system, (*rates, e2e) in REPORTED.items():
        print(f"reported {system:14}" + "".join(f"{rate:14.2f}" for rate in rates) + f"{e2e:8.1f}")
    line = {
        "bench": "shift",
        "quick": options.quick,
        "simulated": True,
        "rows": rows,
        "best_static": best["static"]["start"],
        "best_own_static": best["static-own"]["start"],
        "vs_best_static": ours and ours["throughput_rps"] / best["static"]["throughput_rps"],
        "e2e_vs_best_static": ours and best["static"]["e2e_mean_s"] / ours["e2e_mean_s"],
        "vs_own_best_static": ours and ours["throughput_rps"] / best["static-own"]["throughput_rps"],
        "worst_window_vs_best": ours
        and worst_window(ours, [r for r in results if r["system"] == "static-own"], since, window_s),
    }
    if options.json is not None:
        options.json.write_text(json.dumps(line) + "\n")
    print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
