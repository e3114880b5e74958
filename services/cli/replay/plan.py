"""Which requests of a recorded agent are played, under limits on context and number."""

import msgspec

from services.btrace import Play, Row
from services.cli.replay.contexts import Scale


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Played tokens of one context (prompt and answer), and requests of one agent; None: no limit."""

    context_tokens: int | None = None
    requests_per_agent: int | None = None


def cut(play: Play, scale: Scale, limits: Limits) -> Play:
    """The leading part of `play` within `limits`: with a request go those that depend on it or continue its branch.

    The last request kept of every branch ends it.
    """
    kept: dict[str, Row] = {}
    closed: set[str] = set()
    for row in play.rows:
        fits = limits.context_tokens is None or (
            scale.prompt(row.input_length) + scale.output(row.output_length) <= limits.context_tokens
        )
        due = all(dependency.request_id in kept for dependency in row.starts_after)
        based = row.ctx.base is None or row.ctx.base in kept
        full = limits.requests_per_agent is not None and len(kept) >= limits.requests_per_agent
        if fits and due and based and not full and row.session_id not in closed:
            kept[row.request_id] = row
        else:
            closed.add(row.session_id)
    last = {row.session_id: row.request_id for row in kept.values()}
    rows = [msgspec.structs.replace(row, end=last[row.session_id] == row.request_id) for row in kept.values()]
    return Play(play.id, rows)
