"""How far the learned iteration-time models are off: `python -m bench.model_error [--quick] [--json FILE]`.

Sources: NVIDIA's GB300 tables of GLM-5.2 and Kimi K2.6 (data/silicon), which are not of the models' form, behind the
timed engine's loop in virtual time (simulated); and SGLang with a small model on this machine's CPU. A model is learned
from a warm-up under one workload, and asked about requests of all workloads of its model and batches of other sizes
(single: a request alone; batch: 2 to 8 in prefill, 2 to 64 in decode). Figures are mean relative errors in percent;
`seconds_to_7_pct` is how long warm-up took until both were below 7 %.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.model_error_silicon import Errors, Probe, WarmUp, learn, load
from services.planner.core.options import ModelSettings

CONDITIONS = {"claude-code": (12, 13.0), "putnam": (28, 10.0), "osworld": (16, 1.4)}
"""Agents per node while nine nodes run both phases (108, 256, 144 in all), and mean pause in seconds."""
WORKLOADS = {"kimi": ("osworld", "putnam"), "glm": ("claude-code", "putnam")}
NAMES = {"kimi": "Kimi-K2.6-NVFP4 GB300 table", "glm": "GLM-5.2-NVFP4 GB300 table"}
WARM_UP_S, BOUND_PCT = 120.0, 7.0
TARGETS = {"kimi_single_pct": 4.2, "kimi_batch_pct": 6.3, "kimi_seconds_to_7_pct": 60.0, "glm_single_pct": 7.0}
TARGETS |= {"glm_batch_pct": 7.0}


def silicon(model: str, *, optional_terms: bool, seeds: int, count: int) -> dict[str, Any]:
    """One table: warm-up under each workload and seed, judged on all workloads of the model."""
    tables, requests = load()
    table, workloads = tables[model], WORKLOADS[model]
    probes = [Probe(table, requests[name], count, 7) for name in workloads]
    last: list[Errors] = []
    times: list[float | None] = []
    for name in workloads:
        agents, pause_s = CONDITIONS[name]
        for seed in range(seeds):
            warm_up = WarmUp(table, requests[name], agents, pause_s, seed)
            settings = ModelSettings(optional_terms=optional_terms)
            fits = [
                (at, _mean([probe.errors(fit) for probe in probes]))
                for at, fit in learn(warm_up, model, WARM_UP_S, settings)
            ]
            last.append(fits[-1][1])
            times.append(_below(fits))
    mean = _mean(last)
    reached = [at for at in times if at is not None]
    return {
        "name": NAMES[model] + (", optional terms" if optional_terms else ", Eq. 1 and 2"),
        "single_pct": mean.single,
        "batch_pct": mean.batch,
        "seconds_to_7_pct": max(reached) if len(reached) == len(times) else None,
        "seconds_to_7_mean": fmean(reached) if reached else None,
        "single_prefill_pct": mean.single_prefill,
        "single_decode_pct": mean.single_decode,
        "batch_prefill_pct": mean.batch_prefill,
        "batch_decode_pct": mean.batch_decode,
        "worst_single_pct": max(errors.single for errors in last),
        "worst_batch_pct": max(errors.batch for errors in last),
        "warm_ups": len(last),
    }


def _mean(found: Sequence[Errors]) -> Errors:
    return Errors(
        fmean(errors.single_prefill for errors in found),
        fmean(errors.single_decode for errors in found),
        fmean(errors.batch_prefill for errors in found),
        fmean(errors.batch_decode for errors in found),
    )


def _below(fits: Sequence[tuple[float, Errors]]) -> float | None:
    """When both errors were first below the bound."""
    return next((at for at, errors in fits if errors.single < BOUND_PCT and errors.batch < BOUND_PCT), None)


def sglang(seconds: float) -> dict[str, Any]:
    """SGLang on the CPU; raises with how to install it where it is missing."""
    try:
        import sglang as _  # type: ignore[import-not-found,unused-ignore]  # noqa: F401 - only whether
    except ImportError as error:
        raise SystemExit("SGLang is missing: pip install '.[engine]' (or --without-sglang)") from error
    from bench.model_error_sglang import measure

    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(seconds, Path(folder)))
    return {
        "name": "SGLang 0.5.23, SmolLM2-135M, this CPU",
        "single_pct": found.single,
        "batch_pct": found.batch,
        "seconds_to_7_pct": found.seconds_to_7,
        "iterations": found.iterations,
        "coefficients": {name: getattr(found.model, name) for name in ("c0", "c1", "c2", "c5", "u0", "d0", "d2", "d3")},
    }


def result(sources: list[dict[str, Any]], *, quick: bool) -> dict[str, Any]:
    """The line other programs read; the models' own figures are those with optional terms."""
    line: dict[str, Any] = {"bench": "model_error", "quick": quick, "sources": sources}
    for model, name in NAMES.items():
        best = next(source for source in sources if source["name"] == f"{name}, optional terms")
        line[f"{model}_single_pct"], line[f"{model}_batch_pct"] = best["single_pct"], best["batch_pct"]
        line[f"{model}_seconds_to_7_pct"] = best["seconds_to_7_pct"]
    return line


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.model_error", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one warm-up per workload, fewer requests, no SGLang")
    parser.add_argument("--without-sglang", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    seeds, count = (1, 60) if options.quick else (5, 300)
    sources = [
        silicon(model, optional_terms=optional, seeds=seeds, count=count)
        for model in NAMES
        for optional in (False, True)
    ]
    if not (options.quick or options.without_sglang):
        sources.append(sglang(120.0))
    line = result(sources, quick=options.quick)
    print(f"{'source':50} single %  batch %  seconds to {BOUND_PCT:g} %")
    for source in sources:
        seconds = source["seconds_to_7_pct"]
        shown = "not reached" if seconds is None else f"{seconds:.0f}"
        print(f"{source['name']:50} {source['single_pct']:8.2f} {source['batch_pct']:8.2f}  {shown}")
    for key, bound in TARGETS.items():
        value = line[key]
        met = value is not None and value <= bound
        print(f"{key:24} {'-' if value is None else f'{value:.2f}':>8}  target {bound:g}  {'met' if met else 'MISSED'}")
    if options.json is not None:
        options.json.write_text(json.dumps(line) + "\n")
    print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
