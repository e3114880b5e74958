"""Agents that arrive at a rate, in the simulator: `python -m bench.openloop [--quick] [--json FILE]`.

Claude Code agents, 0.5 to 1.25 a minute, nine nodes, two hours scored; a rate is sustained when P95 TTFT is at most
15 s there and at every lower one. Ours from 6P3D with that target, beside the best static split of plain SGLang and of
our engines (searched at 1.0 a minute) and Dynamo 1.5.1. A rate below the sustained one counts as missed by a switch
when the run at the best static split meets it. `--quick`: one rate, ten minutes scored, a known split, without Dynamo.
Traces: EI_TRACES names their folder.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.stationary import NODES, trimmed
from bench.stationary_runs import CORES, Job, best_split, run_all

SCENARIO = "open-loop"
RATES = (0.5, 0.75, 1.0, 1.25)
TARGET_S = 15.0
OURS, BASELINE, OWN = "ours-ttft-15", "static", "static-own"
START_OF_SEARCH = "4P5D"
QUICK_TIMES = {"warm_up_s": 600.0, "scored_s": 600.0}
QUICK_RATE = 1.0


def sustained(p95_by_rate: dict[float, float]) -> float:
    """The highest rate that meets the target together with all lower ones; 0 if the lowest does not."""
    best = 0.0
    for rate in sorted(p95_by_rate):
        if not p95_by_rate[rate] <= TARGET_S:
            break
        best = rate
    return best


def missed(ours: dict[float, float], own_static: dict[float, float]) -> list[float]:
    """Rates below the highest met one that ours missed though its engines meet them on a fixed split."""
    met = [rate for rate, p95 in ours.items() if p95 <= TARGET_S]
    top = max(met, default=0.0)
    return [rate for rate in sorted(ours) if rate < top and ours[rate] > TARGET_S and own_static[rate] <= TARGET_S]


def reverts_s(decisions: Sequence[dict[str, Any]]) -> list[float]:
    """How long after its order each undone switch was undone."""
    waits: list[float] = []
    ordered_at: float | None = None
    for said in decisions:
        if said["kind"] == "window" and said["to"]:
            ordered_at = said["at_s"]
        elif said["kind"] == "revert" and ordered_at is not None:
            waits.append(said["at_s"] - ordered_at)
            ordered_at = None
    return waits


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.openloop", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--systems", default=f"{OURS},{OWN},{BASELINE},dynamo-1.5.1")
    parser.add_argument("--workers", type=int, default=CORES)
    options = parser.parse_args(argv)
    times: dict[str, Any] = QUICK_TIMES if options.quick else {}
    rates = (QUICK_RATE,) if options.quick else RATES
    systems = [OURS, OWN, BASELINE] if options.quick else options.systems.split(",")
    p95: dict[str, dict[float, float]] = {}
    rows: list[dict[str, Any]] = []
    reverts: list[float] = []
    print(f"{'system':16}{'per min':>8}{'req/s':>8}{'TTFT':>8}{'P95 TTFT':>10}{'E2E':>8}{'switches':>9}  split")
    for system in systems:
        split = None
        if system in (BASELINE, OWN):
            split = START_OF_SEARCH
            if not options.quick:
                split, _ = best_split(Job(SCENARIO, system, None, per_minute=1.0), split, NODES, options.workers)
        jobs = [Job(SCENARIO, system, None, 1, split, per_minute=rate, **times) for rate in rates]
        for rate, result in zip(rates, run_all(jobs, options.workers), strict=True):
            row = {**trimmed(result), "rate": rate, "meets": result["ttft_p95_s"] <= TARGET_S}
            rows.append(row)
            p95.setdefault(system, {})[rate] = row["ttft_p95_s"]
            reverts += reverts_s(result["decisions"]) if system == OURS else []
            print(
                f"{system:16}{rate:8.2f}{row['throughput_rps']:8.2f}{row['ttft_mean_s']:8.2f}{row['ttft_p95_s']:10.1f}"
                f"{row['e2e_mean_s']:8.1f}{row['switches']:9}  {row['split']}{'' if row['meets'] else '  misses'}"
            )
    best = {system: sustained(found) for system, found in p95.items()}
    static = best.get(BASELINE, 0.0)
    line = {
        "bench": "openloop",
        "quick": options.quick,
        "simulated": True,
        "rows": rows,
        "sustained": best,
        "sustained_rate": best.get(OURS),
        "sustained_over_static": best[OURS] / static if static and OURS in best else None,
        "missed_by_switch": len(missed(p95[OURS], p95[OWN])) if OURS in p95 and OWN in p95 else None,
        "worst_revert_s": max(reverts, default=None),
    }
    print(f"sustained (agents a minute): {best}")
    if options.json is not None:
        options.json.write_text(json.dumps(line) + "\n")
    print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
