"""What each part of the product is worth, in the simulator: `python -m bench.ablation [--quick] [--json FILE]`.

Claude Code, 126 agents, nine nodes, from 4P5D: plain SGLang with a fixed split, then the shared pool, asynchronous
fetch, count-aware eviction, routing and the planner, one after another, and each of them alone on the plain base.
`--quick`: a quarter of an hour a run, four configurations. Traces: EI_TRACES names their folder.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.stationary import SHORT_TIMES, trimmed
from bench.stationary_runs import CORES, Job, run_all
from services.simulator.systems.ablated import ALONE, CUMULATIVE, name_of

WORKLOAD, AGENTS, START = "claude-code", 126, "4P5D"
SHORTEST = {"warm_up_s": 300.0, "scored_s": 600.0, "ramp_s": 120.0}
REPORTED = {
    "plain": (4.57, "fixed 4P5D"),
    name_of(CUMULATIVE[3]): (6.27, "with pool, count-aware eviction, routing"),
    name_of(CUMULATIVE[4]): (6.25, "and planner"),
}
"""Requests per second that the reference reported for the configurations nearest to ours."""


def configurations(*, quick: bool) -> list[tuple[str, str]]:
    """(name, system id) in the order of the table."""
    together = [name_of(parts) for parts in CUMULATIVE]
    if quick:
        together = [together[0], together[1], together[3]]
    alone = [] if quick else [name_of(parts) for parts in ALONE]
    return [("plain", "static"), *((name, name) for name in (*together, *alone))]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.ablation", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--short", action="store_true", help="half an hour a run")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--workers", type=int, default=CORES)
    options = parser.parse_args(argv)
    times = SHORTEST if options.quick else SHORT_TIMES if options.short else {}
    named = configurations(quick=options.quick)
    jobs = [
        Job(WORKLOAD, system, AGENTS, seed, START, **times)
        for _, system in named
        for seed in range(1, options.seeds + 1)
    ]
    results = run_all(jobs, options.workers)
    rows: list[dict[str, Any]] = []
    base = 0.0
    print(
        f"{'configuration':42}{'req/s':>7}{'gain':>8}{'rep.':>7}{'TTFT':>8}{'P95':>7}{'E2E':>7}{'lost %':>8}"
        f"{'uncached':>10}"
    )
    for (name, _), first in zip(named, range(0, len(results), options.seeds), strict=True):
        for result in results[first : first + options.seeds]:
            row = {**trimmed(result), "configuration": name, "reported_rps": REPORTED.get(name, (None,))[0]}
            base = base or row["throughput_rps"]
            row["gain_pct"] = 100 * (row["throughput_rps"] / base - 1)
            rows.append(row)
            said = "-" if row["reported_rps"] is None else f"{row['reported_rps']:.2f}"
            print(
                f"{name:42}{row['throughput_rps']:7.2f}{row['gain_pct']:+7.1f}%{said:>7}{row['ttft_mean_s']:8.2f}"
                f"{row['ttft_p95_s']:7.1f}{row['e2e_mean_s']:7.1f}{row['lost_reuse_pct']:8.2f}"
                f"{row['uncached_tokens_per_request']:10.0f}"
            )
    line = {"bench": "ablation", "quick": options.quick, "short": bool(times), "simulated": True, "rows": rows}
    if options.json is not None:
        options.json.write_text(json.dumps(line) + "\n")
    print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
