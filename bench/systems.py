"""Compared systems beside what was reported of them: `python -m bench.systems [--quick] [--only ID,...] [--json FILE]`.

Every system of the catalogue runs simulated Claude Code agents on nine nodes, where something was reported under those
conditions as far as they are known, and each reported figure stands beside the simulated one. A system whose throughput
differs by more than 15 % (its P95 TTFT where no throughput was reported) is marked: no ratio over it is claimed.
The systems of the nine stationary runs (ours, the reference, Dynamo 1.5.1) are in `bench.stationary`.
`--short`: 10 minutes warm-up, 20 scored; `--quick`: the same, for five systems. Traces: EI_TRACES names their folder.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.stationary import SHORT_TIMES, trimmed
from bench.stationary_reported import AGREES
from bench.stationary_runs import CORES, Job, run_all

WORKLOAD = "claude-code"
QUICK = ("static", "sticky", "arrow", "thunderagent", "dynamo-1.6.1")
UNKNOWN_SPLIT = "reported on a fixed split that was not named"


@dataclass(frozen=True)
class Case:
    """One system under the conditions of a report. `reported`: by the names of a row's figures; empty: nothing was."""

    system: str
    agents: int
    split: str
    reported: dict[str, float] = field(default_factory=dict)
    note: str = ""


CASES = (
    Case(
        "static",
        90,
        "4P5D",
        {"throughput_rps": 4.97, "ttft_mean_s": 4.8, "ttft_p95_s": 19.5, "e2e_mean_s": 9.2, "e2e_p95_s": 30.7},
    ),
    Case(
        "static",
        126,
        "4P5D",
        {
            "throughput_rps": 4.66,
            "ttft_mean_s": 15.3,
            "ttft_p95_s": 60.3,
            "e2e_mean_s": 19.7,
            "e2e_p95_s": 66.7,
            "tpot_mean_ms": 4.6,
            "hit_pct": 94.9,
            "lost_reuse_pct": 2.4,
            "uncached_tokens_per_request": 7660,
        },
    ),
    Case(
        "thunderagent",
        126,
        "4P5D",
        {
            "throughput_rps": 4.43,
            "ttft_mean_s": 17.5,
            "ttft_p95_s": 59.8,
            "e2e_mean_s": 22.0,
            "e2e_p95_s": 67.1,
            "tpot_mean_ms": 4.4,
            "hit_pct": 94.7,
            "lost_reuse_pct": 2.6,
            "uncached_tokens_per_request": 8119,
        },
    ),
    Case(
        "arrow",
        90,
        "6P3D",
        {"throughput_rps": 1.72, "lost_reuse_pct": 55.5, "switches": 34},
        "reported: 65 % below 4.9 req/s, ends at 8P1D",
    ),
    Case("sticky", 90, "4P5D", {"ttft_p95_s": 34.0, "e2e_mean_s": 16.0}, UNKNOWN_SPLIT),
    Case("dynamo-kv-router-fixed", 90, "4P5D", {"ttft_p95_s": 65.0, "e2e_mean_s": 34.0}, UNKNOWN_SPLIT),
    Case("pool-lru", 90, "4P5D", {"ttft_p95_s": 95.0, "e2e_mean_s": 38.0}, UNKNOWN_SPLIT),
    Case("llumnix", 90, "4P5D", {}, "reported on H200 only: 12.2 % below the best static split"),
    Case("smg-cache-aware", 90, "4P5D"),
    Case("smg-least-load", 90, "4P5D"),
    Case("mooncake", 90, "4P5D"),
    Case("dynamo-kv-router", 90, "6P3D"),
    Case("dynamo-1.6.1", 90, "6P3D"),
    Case("dynamo-1.6.1-device", 90, "6P3D"),
    Case("sglang-role-switch", 90, "6P3D"),
)


def compare(case: Case, result: dict[str, Any]) -> dict[str, Any]:
    """A row with what was reported, the differences in percent, and whether it agrees within 15 %."""
    off = {name: round(100 * (result[name] / value - 1), 1) for name, value in case.reported.items()}
    decisive = next((name for name in ("throughput_rps", "ttft_p95_s") if name in off), None)
    agrees = None if decisive is None else abs(off[decisive]) <= 100 * AGREES
    row = {**trimmed(result), "reported": case.reported, "difference_pct": off, "agrees": agrees}
    return row | {"note": case.note or ("" if case.reported else "nothing was reported")}


def show(row: dict[str, Any]) -> None:
    """A row, and below it each reported figure."""
    verdict = {True: "agrees", False: "DIFFERS, no ratio is claimed", None: ""}[row["agrees"]]
    print(
        f"{row['system']:23}{row['agents']:4} {row['start']:5} {row['throughput_rps']:6.2f} req/s  "
        f"TTFT {row['ttft_mean_s']:6.2f} P95 {row['ttft_p95_s']:6.1f}  E2E {row['e2e_mean_s']:6.1f} s  "
        f"lost {row['lost_reuse_pct']:6.2f} %  switches {row['switches']:3}, ends {row['split']:5}  {verdict}"
    )
    for name, value in row["reported"].items():
        print(
            f"{'':28}{name:28} simulated {row[name]:10.2f}  reported {value:9g}  {row['difference_pct'][name]:+8.1f} %"
        )
    if row["note"]:
        print(f"{'':28}{row['note']}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.systems", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--only", default="", metavar="ID,...")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--workers", type=int, default=CORES)
    options = parser.parse_args(argv)
    only = options.only.split(",") if options.only else QUICK if options.quick else [case.system for case in CASES]
    times = SHORT_TIMES if options.quick or options.short else {}
    cases = [case for case in CASES if case.system in only]
    jobs = [Job(WORKLOAD, case.system, case.agents, 1, case.split, **times) for case in cases]
    rows = [compare(case, result) for case, result in zip(cases, run_all(jobs, options.workers), strict=True)]
    for row in rows:
        show(row)
    line = {
        "bench": "systems",
        "quick": options.quick,
        "short": bool(times),
        "simulated": True,
        "differing": [f"{row['system']} {row['agents']}" for row in rows if row["agrees"] is False],
        "rows": rows,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(line) + "\n")
    print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
