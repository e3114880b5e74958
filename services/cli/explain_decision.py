"""`ei explain DECISION`: one decision of the planner with every number it was taken on."""

import asyncio
from datetime import UTC, datetime

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from schemas.codec import RejectedMessage
from schemas.phase import DECISION, Decision
from schemas.streams import planner_stream
from schemas.subjects import Subjects
from services.bus import BusError, Delivery, NatsBus
from services.cli.connection import CommandError, Target

LAST = "last"
_QUIET_S, _LONGEST_S = 0.5, 10.0


async def show_decision(target: Target, key: str, *, as_json: bool) -> None:
    """Print the decision whose id is or begins with `key`, or the last one; CommandError when there is none."""
    async with target.bus() as bus:
        found = chosen(await decisions(bus, Subjects(target.partition)), key)
    console = Console()
    if as_json:
        import msgspec

        console.print_json(msgspec.json.encode(found).decode())
    else:
        console.print(rendered(found))


async def decisions(bus: NatsBus, subjects: Subjects) -> list[Decision]:
    """All decisions the broker still has, oldest first."""
    found: list[Decision] = []
    news = asyncio.Event()

    async def take(delivery: Delivery) -> None:
        try:
            found.append(DECISION.decode(delivery.data))
        except RejectedMessage:
            return
        news.set()

    stream = planner_stream(subjects)
    try:
        await bus.ensure_stream(
            stream.name, stream.subjects, max_age_s=stream.max_age_s, last_per_subject=stream.last_per_subject
        )
        await bus.follow(subjects.planner_decision(), take, start="all")
    except BusError as error:
        raise CommandError(f"the planner's decisions cannot be read: {error}") from error
    try:
        async with asyncio.timeout(_LONGEST_S):
            while True:
                news.clear()
                async with asyncio.timeout(_QUIET_S):
                    await news.wait()
    except TimeoutError:
        return found


def chosen(found: list[Decision], key: str) -> Decision:
    """The one that is meant; CommandError names the newest where none or several fit."""
    if not found:
        raise CommandError("the planner has decided nothing yet")
    if key == LAST:
        return found[-1]
    fitting = [decision for decision in found if decision.id.startswith(key)]
    exact = [decision for decision in fitting if decision.id == key]
    if len(exact or fitting) != 1:
        newest = ", ".join(decision.id for decision in found[-5:])
        raise CommandError(f"{len(fitting)} decisions begin with {key!r}; the newest are {newest}")
    return (exact or fitting)[0]


def rendered(decision: Decision) -> RenderableType:
    """What was decided, on what, and what of every other split."""
    change = f" -> {decision.split_new}" if decision.split_new else ""
    applied = "ordered" if decision.applied else "not ordered"
    at = datetime.fromtimestamp(decision.t, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    lines = [
        f"{decision.id}  {at}  {decision.kind or 'decision'}, mode {decision.mode or '?'}",
        f"{decision.split_now}{change} ({applied})",
        f"why: {decision.why}",
    ]
    if decision.nodes:
        lines.append(f"nodes that switch: {', '.join(decision.nodes)}")
    if decision.pinned:
        lines.append(f"pinned: {', '.join(decision.pinned)}")
    work = decision.workload
    if work is not None:
        media = f", {work.media:.2f} media" if work.media else ""
        lines.append(
            f"work of a request: {work.t_uc:,.0f} tokens computed, {work.t_c:,.0f} cached, {work.t_out:,.0f} answered, "
            f"{work.attention_pairs:.3g} pairs, {work.t_acc:.2f} accepted an iteration{media}"
        )
    if decision.q is not None:
        lines.append(f"in decode on average: {decision.q:.1f}")
    if decision.agents is not None and decision.think_s is not None:
        lines.append(
            f"branches under way: {decision.agents:.1f}, each pausing {decision.think_s:.1f} s between requests"
        )
    if decision.slices:
        kinds = sorted(set(decision.slices))
        lines.append("slices: " + ", ".join(f"{decision.slices.count(kind)} {kind}" for kind in kinds))
    errors = [max(model.prefill_error or 0.0, model.decode_error or 0.0) for model in decision.models]
    if errors:
        lines.append(f"models: {len(errors)} nodes, largest error on their newest windows {max(errors):.1%}")
    text = Text("\n".join(lines))
    return Group(text, _verdicts(decision)) if decision.verdicts else text


def _verdicts(decision: Decision) -> Table:
    table = Table()
    for name in ("split", "req/s", "P95 TTFT", "TPOT", "gain", "stderr", "needed"):
        table.add_column(name, justify="left" if name == "split" else "right")
    table.add_column("why")
    for verdict in decision.verdicts:
        tpot = None if verdict.tpot_s is None else verdict.tpot_s * 1e3
        table.add_row(
            verdict.split,
            _number(verdict.throughput_rps, ".3g"),
            _number(verdict.ttft_p95_s, ".3g", " s"),
            _number(tpot, ".1f", " ms"),
            _number(verdict.mean, "+.1%"),
            _number(verdict.stderr, ".1%"),
            _number(verdict.threshold, ".1%"),
            verdict.why,
            style="bold" if verdict.why == "chosen" else "",
        )
    return table


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
