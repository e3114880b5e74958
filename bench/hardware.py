"""Where the gain goes on other hardware: `python -m bench.hardware [--quick] [--only PROFILE] [--json FILE]`.

Simulated Claude Code agents on nine nodes of each profile, from 4P5D: plain SGLang and our engines on that split, our
engines with and without predictive reload, and our engines where loading to the device takes nothing, which is the most
that any loading ahead can gain. On the fixed split reload is judged over pairs of runs of one seed, since it changes
less than seeds do. Ten minutes warm-up, twenty scored; `--quick`: five and five, one seed.
Traces: EI_TRACES names their folder.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.stationary import QUICK_TIMES, SHORT_TIMES, trimmed
from bench.stationary_runs import CORES, Job, run_all
from services.engine.core.timing import PrefillTerms, attention_pairs
from services.simulator.hardware import FREE_LOADS, PROFILES

WORKLOAD, SPLIT = "claude-code", "4P5D"
HARDWARE = ("glm-5.2/gb300", "glm-5.2/h200", "glm-4.6-gqa/h200")
AGENTS, SEEDS = 90, 4
REQUEST = PrefillTerms(1, 5_268, attention_pairs(5_268, 149_732), 149_732)
"""A mean Claude Code request as the reference reported it: so many tokens to compute, the rest of 155,000 loaded."""
SYSTEMS = ("static", "static-own", "static-own-reload", "ours", "ours-reload")
FREE = "static-own, free loads"
FIGURES = (
    "restored_tokens_per_request", "preloaded_tokens_per_request", "load_s", "fetch_exposed_s", "load_hidden_pct",
    "prefill_idle_pct", "brought_ahead_tokens",
)  # fmt: skip


def agents_on(hardware: str) -> int:
    """As many as load a node like 90 do on GB300: in proportion to how fast it computes the mean request."""
    seconds = [PROFILES[name].times.prefill_s(REQUEST) for name in (HARDWARE[0], hardware)]
    return round(AGENTS * seconds[0] / seconds[1])


def in_iterations_s(result: Mapping[str, Any], hardware: str) -> float:
    """Seconds a request that prefill iterations take longer for what is loaded (c3)."""
    return float(PROFILES[hardware].times.c3 * result["restored_tokens_per_request"])


def used_pct(result: Mapping[str, Any]) -> float | None:
    """How much of what was brought ahead its request found on the device; None where nothing was."""
    brought = result["brought_ahead_tokens"]
    return 100 * result["preloaded_tokens_per_request"] * result["requests"] / brought if brought else None


def change_pct(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    """What changed in throughput and latencies, in percent."""
    keys = ("throughput_rps", "ttft_mean_s", "ttft_p95_s", "e2e_mean_s")
    return {key: 100 * (after[key] / before[key] - 1) for key in keys}


def changes(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Of one profile, by system: what our engines, predictive reload and free loads change."""
    pairs = {
        "ours over static": ("static", "ours"),
        "reload, ours": ("ours", "ours-reload"),
        "free loads, fixed split": ("static-own", FREE),
    }
    return {name: change_pct(rows[before], rows[after]) for name, (before, after) in pairs.items()}


def by_seed(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, dict[str, float]]:
    """What reload changes on the fixed split, over pairs of runs of one seed: mean, least and most, in percent."""
    found = [change_pct(*pair) for pair in pairs]
    return {
        key: {
            "mean": fmean(change[key] for change in found),
            "least": min(change[key] for change in found),
            "most": max(change[key] for change in found),
        }
        for key in found[0]
    }


def show(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """The rows of one profile; loads as seconds a request."""
    for name, row in rows.items():
        used = row["used_pct"]
        print(
            f"{row['hardware']:18}{row['agents']:5}  {name:23}{row['throughput_rps']:7.2f}{row['ttft_mean_s']:7.2f}"
            f"{row['ttft_p95_s']:7.1f}{row['e2e_mean_s']:7.1f}{row['prefill_idle_pct']:7.1f}"
            f"{row['restored_tokens_per_request']:10.0f}{row['load_s']:8.3f}{row['fetch_exposed_s']:9.3f}"
            f"{row['in_iterations_s']:8.3f}{row['preloaded_tokens_per_request']:9.0f}"
            f"{'-' if used is None else format(used, '.0f'):>7}  {row['split']}"
        )
    for name, change in changes(rows).items():
        print(f"{'':25}{name:24}" + ", ".join(f"{key} {value:+.1f} %" for key, value in change.items()))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.hardware", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=HARDWARE, metavar="PROFILE")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--workers", type=int, default=CORES)
    options = parser.parse_args(argv)
    times = QUICK_TIMES if options.quick else SHORT_TIMES
    profiles = [options.only] if options.only else list(HARDWARE)
    line: dict[str, Any] = {"bench": "hardware", "quick": options.quick, "simulated": True, "profiles": {}}
    print(
        f"{'hardware':18}{'agents':>5}  {'system':23}{'req/s':>7}{'TTFT':>7}{'P95':>7}{'E2E':>7}{'idle %':>7}"
        f"{'restored':>10}{'load s':>8}{'exposed':>9}{'c3 s':>8}{'ahead':>9}{'used %':>7}  ends at"
    )
    for profile in profiles:
        runs = {name: (name, profile) for name in SYSTEMS} | {FREE: ("static-own", profile + FREE_LOADS)}
        jobs = [
            Job(WORKLOAD, system, agents_on(profile), 1, SPLIT, hardware=hardware, **times)
            for system, hardware in runs.values()
        ]
        paired = [
            Job(WORKLOAD, system, agents_on(profile), seed, SPLIT, hardware=profile, **times)
            for seed in range(1, 2 if options.quick else SEEDS + 1)
            for system in ("static-own", "static-own-reload")
        ]
        rows = {
            name: {
                "hardware": profile,
                **trimmed(result),
                **{key: result[key] for key in FIGURES},
                "in_iterations_s": in_iterations_s(result, hardware),
                "used_pct": used_pct(result),
            }
            for (name, (_, hardware)), result in zip(runs.items(), run_all(jobs, options.workers), strict=True)
        }
        show(rows)
        pairs = run_all(paired, options.workers)
        reload = by_seed(list(zip(pairs[::2], pairs[1::2], strict=True)))
        said = (f"{key} {of['mean']:+.1f} ({of['least']:+.1f} to {of['most']:+.1f}) %" for key, of in reload.items())
        print(f"{'':25}{'reload, fixed split':24}" + ", ".join(said))
        line["profiles"][profile] = {"rows": rows, "changes_pct": changes(rows), "reload_by_seed_pct": reload}
    if options.json is not None:
        options.json.write_text(json.dumps(line) + "\n")
    print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
