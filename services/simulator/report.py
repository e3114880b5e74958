"""The figures of a run by the definitions of the words: throughput, latencies, hit, lost reuse, switches, split."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from services.simulator.call import Call
from services.simulator.record import SAMPLE_S, Sample
from services.simulator.world import Switch

Row = dict[str, Any]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that is at least as large as `share` of all (nearest rank); nan of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan


def scored(calls: Sequence[Call], since: float, until: float) -> list[Call]:
    """Requests answered in [since, until)."""
    return [call for call in calls if call.ended_at is not None and since <= call.ended_at < until]


def figures(calls: Sequence[Call], block_tokens: int, seconds: float) -> Row:
    """Figures of answered requests over so many seconds."""
    ttft, e2e, tpot, waits = [], [], [], []
    by_node: dict[str, list[float]] = defaultdict(list)
    for call in calls:
        assert call.first_token_at is not None
        assert call.ended_at is not None
        assert call.prefill_started_at is not None
        assert call.queued_at is not None
        ttft.append(call.first_token_at - call.arrived_at)
        e2e.append(call.ended_at - call.arrived_at)
        if call.output_tokens > 1:
            tpot.append((call.ended_at - call.first_token_at) / (call.output_tokens - 1))
        waits.append(call.prefill_started_at - call.queued_at)
        by_node[call.prefill_node or ""].append(waits[-1])
    prompt = sum(call.prompt_tokens for call in calls)
    cached = sum(call.cached_tokens for call in calls)
    ideal = sum(call.ideal_blocks for call in calls) * block_tokens
    lost = sum(max(0, call.ideal_blocks * block_tokens - call.cached_tokens) for call in calls)
    loads = [call.fetch_s + call.restore_s for call in calls]
    exposed = [call.fetch_exposed_s for call in calls]
    most = max((mean(waited) for waited in by_node.values()), default=math.nan)
    return {
        "requests": len(calls),
        "throughput_rps": len(calls) / seconds,
        "ttft_mean_s": mean(ttft),
        "ttft_p95_s": percentile(ttft, 0.95),
        "e2e_mean_s": mean(e2e),
        "e2e_p95_s": percentile(e2e, 0.95),
        "tpot_mean_ms": 1e3 * mean(tpot),
        "hit_pct": 100 * cached / prompt if prompt else math.nan,
        "ideal_hit_pct": 100 * ideal / prompt if prompt else math.nan,
        "lost_reuse_pct": 100 * lost / ideal if ideal else 0.0,
        "uncached_tokens_per_request": (prompt - cached) / len(calls) if calls else math.nan,
        "prompt_tokens_per_request": prompt / len(calls) if calls else math.nan,
        "pause_mean_s": mean([call.pause_s for call in calls if call.pause_s is not None]),
        "queue_wait_s": mean(waits),
        "most_loaded_over_average": most / mean(waits) if waits and mean(waits) > 0 else math.nan,
        "fetched_tokens_per_request": mean([float(call.fetched_tokens) for call in calls]),
        "restored_tokens_per_request": mean([float(call.restored_tokens) for call in calls]),
        "preloaded_tokens_per_request": mean([float(call.preloaded_tokens) for call in calls]),
        "load_s": mean(loads),
        "fetch_exposed_s": mean(exposed),
        "load_hidden_pct": 100 * (1 - sum(exposed) / sum(loads)) if sum(loads) else math.nan,
    }


def prefill_use(samples: Sequence[Sample], since: float, until: float) -> Row:
    """Share of their time that prefill nodes compute no prefill, and tokens that were brought ahead, by samples.

    Prefill on other nodes counts as theirs, so the share is exact for a fixed split.
    """
    seen = [sample for sample in samples if since <= sample.at < until]
    if len(seen) < 2:
        return {"prefill_idle_pct": math.nan, "brought_ahead_tokens": 0}
    node_s = sum(sample.prefill_nodes * (after.at - sample.at) for sample, after in pairwise(seen))
    busy_s = seen[-1].prefill_s - seen[0].prefill_s
    return {
        "prefill_idle_pct": 100 * (1 - busy_s / node_s) if node_s else math.nan,
        "brought_ahead_tokens": seen[-1].preloaded_tokens - seen[0].preloaded_tokens,
    }


def switching(switches: Sequence[Switch]) -> Row:
    """Switches of a whole run, those of its start left out; their mean length counts the ones that ended."""
    counted = [switch for switch in switches if switch.counts]
    took = [switch.ended_at - switch.started_at for switch in counted if switch.ended_at is not None]
    return {"switches": len(counted), "switch_mean_s": mean(took) if took else None}


def shares(samples: Sequence[Sample], since: float, until: float) -> dict[str, float]:
    """Share of time at each split."""
    seen = Counter(sample.split for sample in samples if since <= sample.at < until)
    total = sum(seen.values())
    return {split: count / total for split, count in seen.most_common()}


def off_best_pct(splits: dict[str, float], best: str | None) -> float | None:
    """Share of scored time at another split than the best static one; None where that is not known."""
    return None if best is None else 100 * (1.0 - splits.get(best, 0.0))


def over_time(calls: Sequence[Call], samples: Sequence[Sample], window_s: float = 60.0) -> list[Row]:
    """Per window: requests, TTFT, hit, and the mean of the samples; what plots show."""
    rows: list[Row] = []
    windows: dict[int, list[Call]] = defaultdict(list)
    for call in calls:
        if call.ended_at is not None:
            windows[int(call.ended_at // window_s)].append(call)
    looks: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        looks[int(sample.at // window_s)].append(sample)
    for index in sorted(looks):
        there, seen = windows.get(index, []), looks[index]
        ttft = [call.first_token_at - call.arrived_at for call in there if call.first_token_at is not None]
        prompt = sum(call.prompt_tokens for call in there)
        rows.append(
            {
                "at_s": index * window_s,
                "throughput_rps": len(there) / window_s,
                "ttft_mean_s": mean(ttft),
                "ttft_p95_s": percentile(ttft, 0.95),
                "hit_pct": 100 * sum(call.cached_tokens for call in there) / prompt if prompt else math.nan,
                "waiting": mean([float(sample.waiting) for sample in seen]),
                "decoding": mean([float(sample.decoding) for sample in seen]),
                "prefill_nodes": mean([float(sample.prefill_nodes) for sample in seen]),
                "decode_nodes": mean([float(sample.decode_nodes) for sample in seen]),
            }
        )
    return rows


__all__ = [
    "SAMPLE_S",
    "figures",
    "mean",
    "off_best_pct",
    "over_time",
    "percentile",
    "prefill_use",
    "scored",
    "shares",
    "switching",
]
