"""From other splits, and what adapting costs, in the simulator: `python -m bench.starts [--quick] [--json FILE]`.

Claude Code, 126 agents, nine nodes, 30 minutes warm-up, one hour scored. From each of four initial splits: where ours
ends, and how far mean E2E lies apart. At the best split: ours against the same engines with the split held, one pair of
runs per seed; the mean difference in throughput with its 95 % interval (Student's t, pairs as samples). `--quick`: ten
minutes a run, two splits, two pairs. Traces: EI_TRACES names their folder.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from scipy.stats import t as student

from bench.stationary import QUICK_TIMES, trimmed
from bench.stationary_runs import CORES, Job, run_all

WORKLOAD, AGENTS, BEST = "claude-code", 126, "4P5D"
STARTS = ("3P6D", "4P5D", "5P4D", "6P3D")
SEEDS = (1, 2, 3, 4, 5)
OURS, HELD = "ours", "static-own"


def apart_pct(seconds: Sequence[float]) -> float:
    """How much the largest lies above the smallest."""
    return 100.0 * (max(seconds) / min(seconds) - 1.0)


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and the ends of its 95 % interval."""
    mean = fmean(values)
    half = float(student.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.starts", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--workers", type=int, default=CORES)
    options = parser.parse_args(argv)
    times: dict[str, Any] = QUICK_TIMES if options.quick else {}
    starts, seeds = (STARTS[1:3], SEEDS[:2]) if options.quick else (STARTS, SEEDS)
    from_each = [Job(WORKLOAD, OURS, AGENTS, 1, split, **times) for split in starts]
    pairs = [Job(WORKLOAD, system, AGENTS, seed, BEST, **times) for seed in seeds for system in (OURS, HELD)]
    results = [trimmed(result) for result in run_all([*from_each, *pairs], options.workers)]
    rows, paired = results[: len(starts)], results[len(starts) :]
    print(f"{'from':6}{'req/s':>8}{'E2E s':>8}{'P95 TTFT':>10}{'switches':>10}  ends at")
    for row in rows:
        print(
            f"{row['start']:6}{row['throughput_rps']:8.2f}{row['e2e_mean_s']:8.2f}{row['ttft_p95_s']:10.1f}"
            f"{row['switches']:10}  {row['split']}"
        )
    differences = [
        100.0 * (ours["throughput_rps"] / held["throughput_rps"] - 1.0)
        for ours, held in zip(paired[::2], paired[1::2], strict=True)
    ]
    mean, low, high = interval(differences)
    each = ", ".join(f"{difference:+.2f}" for difference in differences)
    print(f"adapting at {BEST}: {each} %, mean {mean:+.2f} % ({low:+.2f} to {high:+.2f})")
    line = {
        "bench": "starts",
        "quick": options.quick,
        "simulated": True,
        "rows": results,
        "e2e_apart_pct": apart_pct([row["e2e_mean_s"] for row in rows]),
        "ends_at": [row["split"] for row in rows],
        "adapting_pct": differences,
        "adapting_mean_pct": mean,
        "adapting_interval_pct": [low, high],
    }
    if options.json is not None:
        options.json.write_text(json.dumps(line) + "\n")
    print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
