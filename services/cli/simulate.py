"""`ei simulate`: a scenario file run in virtual time with one system, and what came of it."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from services.btrace import TraceError
from services.cli.connection import CommandError
from services.simulator.perfetto import write_trace
from services.simulator.plots import PlotsMissing, draw
from services.simulator.scenario import Run, Scenario, ScenarioError, read_scenario, simulate

SHOWN = (
    ("throughput_rps", "throughput", "{:.2f} requests/s"),
    ("ttft_mean_s", "TTFT mean", "{:.2f} s"),
    ("ttft_p95_s", "TTFT P95", "{:.2f} s"),
    ("e2e_mean_s", "E2E mean", "{:.2f} s"),
    ("e2e_p95_s", "E2E P95", "{:.2f} s"),
    ("tpot_mean_ms", "TPOT mean", "{:.1f} ms"),
    ("hit_pct", "KV hit", "{:.2f} %"),
    ("ideal_hit_pct", "ideal hit", "{:.2f} %"),
    ("lost_reuse_pct", "lost reuse", "{:.2f} %"),
    ("uncached_tokens_per_request", "uncached tokens", "{:.0f} a request"),
    ("queue_wait_s", "prefill queueing", "{:.2f} s"),
    ("most_loaded_over_average", "most loaded node", "{:.2f} x the average wait"),
    ("pause_mean_s", "pause", "{:.1f} s"),
    ("switches", "switches", "{}"),
    ("switch_mean_s", "switch time", "{:.1f} s"),
    ("sessions_per_h", "sessions", "{:.0f} an hour"),
    ("split", "split at the end", "{}"),
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The command's options; None leaves the scenario's own value."""

    scenario: Path
    system: str = "ours"
    seed: int = 1
    agents: int | None = None
    split: str | None = None
    warm_up_s: float | None = None
    scored_s: float | None = None
    traces: Path | None = None
    json: Path | None = None
    plots: Path | None = None
    record: Path | None = None


def run(wanted: Wanted) -> Run:
    """Run it, write what was asked for, and return it; CommandError for anything that cannot be done."""
    if wanted.traces is not None:
        os.environ["EI_TRACES"] = str(wanted.traces)
    for path in (wanted.json, wanted.record):
        if path is not None and not path.parent.is_dir():
            raise CommandError(f"{path}: there is no folder {path.parent}")
    try:
        scenario = _changed(read_scenario(wanted.scenario), wanted)
        found = simulate(scenario, wanted.system, seed=wanted.seed, slices=wanted.record is not None)
        if wanted.plots is not None:
            draw(found, wanted.plots)
    except (ScenarioError, TraceError, PlotsMissing, ValueError) as error:
        raise CommandError(str(error)) from error
    if wanted.json is not None:
        wanted.json.write_text(json.dumps(document(found), allow_nan=False) + "\n")
    if wanted.record is not None:
        write_trace(found.recorder, wanted.record)
    return found


def _changed(scenario: Scenario, wanted: Wanted) -> Scenario:
    changes: dict[str, Any] = {
        name: value
        for name, value in (
            ("split", wanted.split),
            ("warm_up_s", wanted.warm_up_s),
            ("scored_s", wanted.scored_s),
        )
        if value is not None
    }
    if wanted.agents is not None:
        first, *rest = scenario.work
        changes["work"] = [msgspec.structs.replace(first, agents=wanted.agents), *rest]
    changed = msgspec.to_builtins(msgspec.structs.replace(scenario, **changes))
    try:
        return msgspec.convert(changed, Scenario)
    except msgspec.ValidationError as error:
        raise ScenarioError(f"{wanted.scenario}: {error}") from error


def document(run: Run) -> dict[str, Any]:
    """What `--json` writes: the row of figures, and how it came to it; not a number is null."""
    plain: dict[str, Any] = _finite(
        {
            "simulated": True,
            "row": run.row,
            "timeline": run.timeline,
            "decisions": run.decisions,
            "switches": run.switches,
            "cpu_s": run.cpu_s,
        }
    )
    return plain


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(run: Run) -> str:
    """The figures as lines of text."""
    row = run.row
    head = f"{row['workload']}, {row['agents']} agents, {row['system']} (simulated, {run.cpu_s:.0f} s of CPU)"
    lines = [head]
    for key, label, form in SHOWN:
        value = run.row[key]
        lines.append(f"  {label:18} {'-' if value is None else form.format(value)}")
    return "\n".join(lines)
