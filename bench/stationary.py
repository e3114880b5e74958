"""Nine stationary runs in the simulator, every system: `python -m bench.stationary [--quick] [--json FILE]`.

Putnam, Claude Code and OSWorld agents at three concurrencies each on nine simulated nodes: 30 minutes warm-up, one hour
scored, start 6P3D. Systems that never change the split run at their best one, which is searched for. First the runs at
splits that the reference named, with its figure beside: where they differ by more than 15 %, no ratio is claimed.
All figures here are simulated, those called reported excepted. Traces: EI_TRACES names their folder.
`--quick`: one concurrency a workload, three systems, five minutes warm-up and five scored: the planner decides first at
the end of it. It shows that everything runs, and checks no bound. `--short`: half an hour a run, for a first look.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.stationary_reported import AGENTS, AGREES, KNOWN_SPLITS, START_OF_SEARCH, SYSTEMS
from bench.stationary_runs import CORES, Job, best_split, run_all
from bench.stationary_verdict import show as show_verdicts
from bench.stationary_verdict import verdicts
from services.simulator.systems.catalogue import FIXED_SPLIT

NODES, GPUS_A_NODE = 9, 4
QUICK = {"claude-code": 126, "putnam": 288, "osworld": 144}
QUICK_SPLIT = {"claude-code": "4P5D", "putnam": "2P7D", "osworld": "8P1D"}
QUICK_TIMES = {"warm_up_s": 300.0, "scored_s": 300.0, "ramp_s": 60.0}
SHORT_TIMES = {"warm_up_s": 600.0, "scored_s": 1200.0, "ramp_s": 120.0}
KEYS = (
    "workload", "agents", "system", "throughput_rps", "ttft_mean_s", "ttft_p95_s", "e2e_mean_s", "e2e_p95_s",
    "tpot_mean_ms", "hit_pct", "ideal_hit_pct", "lost_reuse_pct", "uncached_tokens_per_request", "pause_mean_s",
    "queue_wait_s", "most_loaded_over_average", "switches", "switch_mean_s", "off_best_pct", "sessions_per_h", "split",
)  # fmt: skip
DETAILS = ("seed", "splits", "requests", "prompt_tokens_per_request", "cpu_s", "start")


def trimmed(result: dict[str, Any]) -> dict[str, Any]:
    """A row as it is published."""
    return {key: result.get(key) for key in (*KEYS, *DETAILS)}


def show(rows: Sequence[dict[str, Any]]) -> None:
    """A table of rows, with what the reference reported for them."""
    print(f"{'workload':12}{'agents':>7} {'system':18}{'req/s':>7}{'rep.':>7}{'TTFT':>8}{'P95':>8}{'E2E':>8}{'rep.':>7}"
          f"{'TPOT ms':>8}{'hit %':>7}{'lost %':>7}{'rep.':>6}{'sw':>4}{'mean s':>8}{'off %':>7}  split")  # fmt: skip
    for row in rows:
        said = SYSTEMS.get((row["workload"], row["agents"], row["system"]))
        shown = [_number(value) for value in (said or (None, None, None))[:3]]
        took, off = _number(row["switch_mean_s"], ".1f"), _number(row["off_best_pct"], ".0f")
        print(
            f"{row['workload']:12}{row['agents']:7} {row['system']:18}{row['throughput_rps']:7.2f}{shown[0]:>7}"
            f"{row['ttft_mean_s']:8.2f}{row['ttft_p95_s']:8.1f}{row['e2e_mean_s']:8.1f}{shown[1]:>7}"
            f"{row['tpot_mean_ms']:8.1f}{row['hit_pct']:7.2f}{row['lost_reuse_pct']:7.2f}{shown[2]:>6}"
            f"{row['switches']:4}{took:>8}{off:>7}  {row['split']}"
        )


def _number(value: float | None, form: str = "g") -> str:
    return "-" if value is None else format(value, form)


def against_reported(times: dict[str, float], workers: int, seed: int) -> list[dict[str, Any]]:
    """The runs at known splits."""
    jobs = [Job(workload, system, agents, seed, split, **times) for workload, agents, system, split in KNOWN_SPLITS]
    found = run_all(jobs, workers)
    rows: list[dict[str, Any]] = []
    print(f"{'at a known split':34}{'simulated':>10}{'reported':>10}{'ratio':>7}")
    for key, result in zip(KNOWN_SPLITS, found, strict=True):
        reported = KNOWN_SPLITS[key].throughput_rps
        ratio = result["throughput_rps"] / reported
        verdict = "" if abs(ratio - 1) <= AGREES else f"  off by more than {AGREES:.0%}"
        name = f"{key[0]} {key[1]} {key[2]} {key[3]}"
        print(f"{name:34}{result['throughput_rps']:10.2f}{reported:10.2f}{ratio:7.2f}{verdict}")
        rows.append({**trimmed(result), "reported_rps": reported, "ratio": ratio})
    return rows


def quick(workers: int) -> dict[str, Any]:
    """An honest smaller run: one concurrency a workload, three systems, ten minutes each. It checks no bound."""
    jobs = [
        Job(workload, system, agents, 1, QUICK_SPLIT[workload] if system == "static-own" else None, **QUICK_TIMES)
        for system in ("static-own", "ours", "dynamo-1.5.1")
        for workload, agents in QUICK.items()
    ]
    rows = [trimmed(result) for result in run_all(jobs, workers)]
    show(rows)
    return {"bench": "stationary", "quick": True, "simulated": True, "rows": rows}


def _without_search(systems: Sequence[str], seeds: int, times: dict[str, float], *, search: bool) -> list[Job]:
    """The runs whose split is known beforehand: made first, side by side; the rows then find them in the store."""
    return [
        Job(workload, system, agents, seed, START_OF_SEARCH[workload] if system in FIXED_SPLIT else None, **times)
        for workload, concurrencies in AGENTS.items()
        for agents in concurrencies
        for system in systems
        if not (search and system in FIXED_SPLIT)
        for seed in range(1, seeds + 1)
    ]


def full(
    systems: Sequence[str], seeds: int, workers: int, times: dict[str, float], *, search: bool = True
) -> dict[str, Any]:
    """Everything that was asked for. Without `search` a system of a fixed split runs at the one the reference named."""
    known = against_reported(times, workers, 1)
    run_all(_without_search(systems, seeds, times, search=search), workers)
    rows: list[dict[str, Any]] = []
    searched: list[dict[str, Any]] = []
    for workload, concurrencies in AGENTS.items():
        for agents in concurrencies:
            best: dict[str, str] = {}
            for system in systems:
                job = Job(workload, system, agents, 1, None, **times)
                if system in FIXED_SPLIT and not search:
                    best[system] = START_OF_SEARCH[workload]
                elif system in FIXED_SPLIT:
                    best[system], tried = best_split(job, START_OF_SEARCH[workload], NODES, workers)
                    hours = sum(GPUS_A_NODE * NODES * (job.resolved().ends_s / 3600) for _ in tried)
                    searched.append(
                        {
                            "workload": workload,
                            "agents": agents,
                            "system": system,
                            "best": best[system],
                            "gpu_hours": hours,
                            "throughput_by_split": {run["start"]: run["throughput_rps"] for run in tried},
                        }
                    )
                jobs = [Job(workload, system, agents, seed, best.get(system), **times) for seed in range(1, seeds + 1)]
                rows += [trimmed(result) for result in run_all(jobs, workers)]
            top = best.get("static-own")
            for row in rows:
                if top is not None and (row["workload"], row["agents"]) == (workload, agents):
                    row["off_best_pct"] = 100 * (1 - (row["splits"] or {}).get(top, 0.0))
    show(rows)
    found = verdicts(rows)
    show_verdicts(found)
    cost = max((row["cpu_s"] for row in rows), default=0.0)
    print(f"CPU of a run: at most {cost:.0f} s")
    return {
        "bench": "stationary",
        "quick": False,
        "simulated": True,
        "rows": rows,
        "known_splits": known,
        "search": searched,
        "verdicts": found,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.stationary", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="ten minutes a run, one concurrency, three systems")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--systems", default="ours,static-own,static,smg-least-load,dynamo-1.5.1,dynamo-1.6.1")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--workers", type=int, default=CORES)
    parser.add_argument("--short", action="store_true", help="half an hour a run, for a first look")
    parser.add_argument("--no-search", action="store_true", help="fixed splits as the reference named them")
    options = parser.parse_args(argv)
    if options.quick:
        line = quick(options.workers)
    else:
        times = SHORT_TIMES if options.short else {}
        systems = options.systems.split(",")
        line = full(systems, options.seeds, options.workers, times, search=not options.no_search)
        line |= {"warm_up_s": times.get("warm_up_s", 1800.0), "scored_s": times.get("scored_s", 3600.0)}
    if options.json is not None:
        options.json.write_text(json.dumps(line) + "\n")
    print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
