"""The figures of a run by one definition for both simulators."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from services.simulator.report import percentile

Figures = dict[str, float]
COMPARED = ("rps", "ttft_mean_s", "e2e_mean_s", "reuse_pct")


@dataclass(frozen=True, slots=True)
class Served:
    """One answered request: virtual seconds, tokens. `ready_s`: its prompt had KV where it decodes."""

    arrived_s: float
    ready_s: float
    ended_s: float
    prompt_tokens: int
    cached_tokens: int


def figures(served: Iterable[Served], since_s: float, until_s: float) -> Figures:
    """Of the requests answered in [since_s, until_s). TTFT is the time until the prompt has KV where it
    decodes; reuse a share of prompt tokens."""
    chosen = [one for one in served if since_s <= one.ended_s < until_s]
    if not chosen:
        raise ValueError(f"no request was answered between {since_s:g} and {until_s:g} s")
    ttft = [one.ready_s - one.arrived_s for one in chosen]
    return {
        "requests": float(len(chosen)),
        "rps": len(chosen) / (until_s - since_s),
        "ttft_mean_s": fmean(ttft),
        "ttft_p95_s": percentile(ttft, 0.95),
        "e2e_mean_s": fmean(one.ended_s - one.arrived_s for one in chosen),
        "reuse_pct": 100.0 * sum(one.cached_tokens for one in chosen) / sum(one.prompt_tokens for one in chosen),
    }


def middle(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median of every number over the runs, and as `spread_pct` how far apart they lie: (most - least) / median."""
    names = [name for name, value in runs[0].items() if isinstance(value, float)]
    values = {name: sorted(run[name] for run in runs) for name in names}
    found: dict[str, Any] = {name: median(each) for name, each in values.items()}
    found["spread_pct"] = {name: share(values[name][-1] - values[name][0], found[name]) for name in COMPARED}
    return found


def share(part: float, whole: float) -> float:
    """In percent; 0 of nothing."""
    return 100.0 * part / whole if whole else 0.0


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """How far ours is from theirs, in percent; of reuse the difference in percentage points."""
    found = {name: share(ours[name] - theirs[name], theirs[name]) for name in COMPARED if name != "reuse_pct"}
    return found | {"reuse_points": ours["reuse_pct"] - theirs["reuse_pct"]}
