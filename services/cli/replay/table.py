"""A summary as people read it."""

from rich.table import Table

from services.cli.replay.report import Distribution, Summary


def summary_table(summary: Summary, title: str) -> Table:
    """Two columns: what, and how much."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in rows_of(summary):
        table.add_row(name, value)
    return table


def rows_of(summary: Summary) -> list[tuple[str, str]]:
    """Name and value of every metric, in reading order."""
    s = summary
    return [
        ("requests answered / failed / turned away", f"{s.requests} / {s.failed} / {s.turned_away}"),
        ("agents started / ended", f"{s.agents} / {s.sessions_ended}"),
        ("requests/s, sessions/h", f"{s.throughput_rps:.2f}, {s.sessions_per_h:.0f}"),
        ("prompt / output tokens a request", f"{s.prompt_tokens_per_request:.0f} / {s.output_tokens_per_request:.1f}"),
        ("uncached tokens a request", f"{s.uncached_tokens_per_request:.0f}"),
        ("restored from host a request", number(s.restored_tokens_per_request, "{:.0f}")),
        ("KV hit / ideal hit", f"{s.hit_pct:.2f} % / {s.ideal_hit_pct:.2f} %"),
        ("lost KV reuse", f"{s.lost_reuse_pct:.2f} % ({s.lost_tokens} tokens)"),
        ("TTFT mean / p50 / p95", spread(s.ttft_s, "{:.3f} s")),
        ("TPOT mean / p50 / p95", spread(s.tpot_ms, "{:.1f} ms")),
        ("E2E mean / p50 / p95", spread(s.e2e_s, "{:.3f} s")),
        ("pause mean / p50 / p95", spread(s.pause_s, "{:.2f} s")),
        ("prefill queueing mean / p50 / p95", spread(s.queue_s, "{:.3f} s")),
        ("most loaded node over average", number(s.most_loaded_over_average, "{:.2f}")),
        ("TTFT prediction error", number(s.prediction_error_s, "{:.3f} s")),
        ("switches, mean time", f"{len(s.switches)}, {number(s.switch_mean_s, '{:.3f} s')}"),
        ("split at the end", s.split or "-"),
    ]


def number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def spread(values: Distribution, form: str) -> str:
    return " / ".join(number(value, form) for value in (values.mean, values.p50, values.p95))
