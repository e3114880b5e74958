"""Loading a prefix while its request waits: `python -m bench.fetch [--quick] [--short] [--json FILE]`.

Against loading it when its prefill starts. Simulated: Claude Code, nine nodes at 4P5D, 126 agents on GB300 and fewer on
H200. Within a pair split, routing and pools are the same, and only the time of loading differs. The reference reported
one such pair (GB300, 126), without naming its pool. `--short`: half an hour a run; `--quick`: that for the second pair.
Traces: EI_TRACES names their folder.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.hardware import agents_on
from bench.stationary import SHORT_TIMES, trimmed
from bench.stationary_runs import CORES, Job, run_all
from services.simulator.systems.ablated import NO_FETCH, name_of

WORKLOAD, AGENTS, SPLIT = "claude-code", 126, "4P5D"
OUR_ROUTING = (name_of(NO_FETCH), name_of(["pool", "fetch", "eviction", "routing"]))


class Pair(NamedTuple):
    """What both sides have, the side that loads at the start, and the one that loads while waiting."""

    name: str
    sides: tuple[str, str]
    hardware: str = "glm-5.2/gb300"
    agents: int = AGENTS


PAIRS = (
    Pair("host memory per node, gateway's routing", ("static", name_of(["fetch"]))),
    Pair("one pool, gateway's routing", (name_of(["pool"]), name_of(["pool", "fetch"]))),
    Pair("one pool, our eviction and routing", OUR_ROUTING),
    Pair("the same on H200 (PCIe 5)", OUR_ROUTING, "glm-5.2/h200", agents_on("glm-5.2/h200")),
    Pair("the same, KV of a GQA model", OUR_ROUTING, "glm-4.6-gqa/h200", agents_on("glm-4.6-gqa/h200")),
)
FIGURES = (
    "fetched_tokens_per_request", "restored_tokens_per_request", "load_s", "fetch_exposed_s", "load_hidden_pct",
    "prefill_idle_pct",
)  # fmt: skip
REPORTED = (
    {"throughput_rps": 4.62, "prefill_idle_pct": 23.6, "ttft_mean_s": 15.7, "ttft_p95_s": 56.4, "e2e_mean_s": 20.2},
    {"throughput_rps": 5.18, "prefill_idle_pct": 14.4, "ttft_mean_s": 12.1, "ttft_p95_s": 42.8, "e2e_mean_s": 16.5},
)
"""Of load at the start, and of load while waiting."""


def kept(result: dict[str, Any]) -> dict[str, Any]:
    """A row as it is published."""
    return {**trimmed(result), **{key: result[key] for key in FIGURES}}


def difference(start: Mapping[str, float], waiting: Mapping[str, float]) -> dict[str, float]:
    """What loading while waiting changes: throughput and mean TTFT in percent, idle prefill time in points."""
    return {
        "throughput_pct": 100 * (waiting["throughput_rps"] / start["throughput_rps"] - 1),
        "ttft_mean_pct": 100 * (waiting["ttft_mean_s"] / start["ttft_mean_s"] - 1),
        "prefill_idle_points": waiting["prefill_idle_pct"] - start["prefill_idle_pct"],
    }


def show(name: str, start: Mapping[str, Any], waiting: Mapping[str, Any]) -> None:
    """Both sides of a pair and their difference; figures that are missing as a dash."""
    keys = ("throughput_rps", "ttft_mean_s", "ttft_p95_s", "e2e_mean_s", *FIGURES)
    print(f"{name:42}{'load at start':>16}{'while waiting':>16}")
    for key in keys:
        values = [side.get(key) for side in (start, waiting)]
        if values != [None, None]:
            print(f"  {key:40}" + "".join("{:>16}".format("-" if v is None else format(v, ".3f")) for v in values))
    print("  " + ", ".join(f"{key} {value:+.1f}" for key, value in difference(start, waiting).items()))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.fetch", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--short", action="store_true", help="half an hour a run")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--workers", type=int, default=CORES)
    options = parser.parse_args(argv)
    pairs = PAIRS[1:2] if options.quick else PAIRS
    times = SHORT_TIMES if options.quick or options.short else {}
    jobs = [
        Job(WORKLOAD, system, pair.agents, 1, SPLIT, hardware=pair.hardware, **times)
        for pair in pairs
        for system in pair.sides
    ]
    results = iter(run_all(jobs, options.workers))
    rows: list[dict[str, Any]] = []
    show("reported by the reference", *REPORTED)
    for name, _, hardware, _ in pairs:
        start, waiting = (kept(next(results)) for _ in range(2))
        show(name, start, waiting)
        change = difference(start, waiting)
        rows.append({"pair": name, "hardware": hardware, "at_start": start, "waiting": waiting, "difference": change})
    line = {
        "bench": "fetch",
        "quick": options.quick,
        "short": bool(times),
        "simulated": True,
        "reported": {"at_start": REPORTED[0], "waiting": REPORTED[1], "difference": difference(*REPORTED)},
        "rows": rows,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(line) + "\n")
    print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
