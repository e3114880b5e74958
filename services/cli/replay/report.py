"""The metrics of a replay, from its records: what agents saw, and what their contexts cost."""

from collections import defaultdict
from collections.abc import Sequence

import msgspec
import numpy as np

from services.cli.replay.records import Outcome, RequestRecord


class Distribution(msgspec.Struct, frozen=True):
    """Mean and percentiles; None without a value."""

    mean: float | None = None
    p50: float | None = None
    p95: float | None = None

    @classmethod
    def of(cls, values: Sequence[float], scale: float = 1.0) -> "Distribution":
        if not values:
            return cls()
        array = np.asarray(values, dtype=float) * scale
        return cls(float(array.mean()), float(np.percentile(array, 50)), float(np.percentile(array, 95)))


class SwitchSeen(msgspec.Struct, frozen=True):
    """A change of the split during the replay; `took_s` None while it was not over."""

    at_s: float
    decision: str
    split: str
    took_s: float | None
    moved: int


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One replay. Shares in percent, times in seconds (`tpot_ms` in milliseconds), tokens of the played scale.

    `queue_*` are None without the cluster's telemetry. `most_loaded_over_average`: largest mean queueing time of a
    prefill node over the mean of all requests.
    """

    agents: int
    sessions_ended: int
    requests: int
    failed: int
    turned_away: int
    scored_s: float
    throughput_rps: float
    sessions_per_h: float
    prompt_tokens_per_request: float
    output_tokens_per_request: float
    uncached_tokens_per_request: float
    restored_tokens_per_request: float | None
    hit_pct: float
    ideal_hit_pct: float
    lost_reuse_pct: float
    lost_tokens: int
    ttft_s: Distribution
    tpot_ms: Distribution
    e2e_s: Distribution
    pause_s: Distribution
    queue_s: Distribution
    most_loaded_over_average: float | None
    prediction_error_s: float | None
    switches: list[SwitchSeen]
    switch_mean_s: float | None
    split: str


def summarise(
    records: Sequence[RequestRecord],
    *,
    agents: int,
    ended_s: Sequence[float],
    elapsed_s: float,
    warmup_s: float = 0.0,
    switches: Sequence[SwitchSeen] = (),
    split: str = "",
) -> Summary:
    """Compute the metrics over the scored records; the scored time ends at `elapsed_s`."""
    scored = [record for record in records if record.scored]
    good = [record for record in scored if record.outcome is Outcome.ANSWERED]
    seconds = max(1e-9, elapsed_s - warmup_s)
    count = max(1, len(good))
    prompt, cached, ideal = (
        sum(getattr(record, key) for record in good) for key in ("prompt_tokens", "cached_tokens", "ideal_tokens")
    )
    lost = sum(max(0, record.ideal_tokens - record.cached_tokens) for record in good)
    restored = [record.restored_tokens for record in good if record.restored_tokens is not None]
    sessions = sum(1 for end in ended_s if end >= warmup_s)
    times = [switch.took_s for switch in switches if switch.took_s is not None]
    errors = [abs(r.ttft_predicted_s - r.ttft_s) for r in good if r.ttft_predicted_s is not None and r.ttft_s]
    return Summary(
        agents=agents,
        sessions_ended=sessions,
        requests=len(good),
        failed=len(scored) - len(good),
        turned_away=sum(record.turned_away for record in scored),
        scored_s=seconds,
        throughput_rps=len(good) / seconds,
        sessions_per_h=sessions * 3600 / seconds,
        prompt_tokens_per_request=prompt / count,
        output_tokens_per_request=sum(record.output_tokens for record in good) / count,
        uncached_tokens_per_request=(prompt - cached) / count,
        restored_tokens_per_request=sum(restored) / len(restored) if restored else None,
        hit_pct=_percent(cached, prompt),
        ideal_hit_pct=_percent(ideal, prompt),
        lost_reuse_pct=_percent(lost, ideal),
        lost_tokens=lost,
        ttft_s=Distribution.of([r.ttft_s for r in good if r.ttft_s is not None]),
        tpot_ms=Distribution.of([r.tpot_s for r in good if r.tpot_s is not None], 1000),
        e2e_s=Distribution.of([r.e2e_s for r in good if r.e2e_s is not None]),
        pause_s=Distribution.of([r.pause_s for r in good if r.pause_s is not None]),
        queue_s=Distribution.of([r.queue_s for r in good if r.queue_s is not None]),
        most_loaded_over_average=_most_loaded(good),
        prediction_error_s=sum(errors) / len(errors) if errors else None,
        switches=list(switches),
        switch_mean_s=sum(times) / len(times) if times else None,
        split=split,
    )


def _percent(part: float, whole: float) -> float:
    return 100 * part / whole if whole else 0.0


def _most_loaded(records: Sequence[RequestRecord]) -> float | None:
    waits: dict[str, list[float]] = defaultdict(list)
    for record in records:
        if record.queue_s is not None and record.prefill_node:
            waits[record.prefill_node].append(record.queue_s)
    everyone = [wait for node in waits.values() for wait in node]
    mean = sum(everyone) / len(everyone) if everyone else 0.0
    return max(sum(node) / len(node) for node in waits.values()) / mean if mean > 0 else None
