"""`ei tail`: messages of the bus as they pass, decoded."""

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from schemas import branch, iteration_model, kv, phase, serve, telemetry
from schemas.codec import Decoder, RejectedMessage
from schemas.subjects import Subjects, parse
from services.bus import Delivery
from services.cli.connection import Target

DECODERS: dict[tuple[str, str], Decoder[Any]] = {
    ("branch", "event"): branch.BRANCH_EVENT,
    ("telemetry", "iteration"): telemetry.ITERATION_BATCH,
    ("telemetry", "node"): telemetry.NODE_TELEMETRY,
    ("telemetry", "request"): telemetry.REQUEST_TELEMETRY,
    ("telemetry", "router"): telemetry.ROUTER_TELEMETRY,
    ("phase", "command"): phase.PHASE_COMMAND,
    ("phase", "state"): phase.PHASE_STATE,
    ("planner", "decision"): phase.DECISION,
    ("planner", "models"): iteration_model.PLANNER_MODELS,
    ("kv", "location"): kv.KV_LOCATION,
    ("kv", "reference"): kv.KV_REFERENCE,
    ("node", "hello"): kv.NODE_HELLO,
    ("serve", ""): serve.SERVE_REQUEST,
    ("reply", ""): serve.REPLY_BATCH,
    ("cancel", ""): serve.CANCEL_REQUEST,
    ("handoff", ""): serve.HANDOFF,
}


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """What to show: messages about `node`, or about `branch`; None: all."""

    node: str | None = None
    branch: str | None = None

    def takes(self, entity: str | None, content: dict[str, Any]) -> bool:
        if self.node is not None and self.node not in (entity, content.get("node")):
            return False
        return self.branch is None or content.get("branch") == self.branch


def patterns(subjects: Subjects, given: str | None) -> list[str]:
    """The subjects to listen on: a full subject or `telemetry.node` with all below it, nothing as everything."""
    if not given:
        return [f"{subjects.prefix}.>"]
    full = given if given.startswith("ei.") else f"{subjects.prefix}.{given}"
    return [full] if full.endswith(">") else [full, f"{full}.>"]


def line_of(delivery: Delivery, wanted: Filter) -> str | None:
    """One line of JSON for a message, or None when the filter leaves it out."""
    try:
        subject = parse(delivery.subject)
    except ValueError:
        return None
    decoder = DECODERS.get((subject.topic, subject.event))
    if decoder is None:
        content: dict[str, Any] = {"bytes": len(delivery.data)}
    else:
        try:
            content = _plain(decoder.decode(delivery.data))
        except RejectedMessage as rejected:
            content = {"rejected": rejected.reason, "error": str(rejected)}
    if not wanted.takes(subject.entity, content):
        return None
    return f"{delivery.subject} {msgspec.json.encode(content).decode()}"


def _plain(message: Any) -> dict[str, Any]:
    """A message as plain values; packed bytes are named by their length."""
    values: dict[str, Any] = msgspec.to_builtins(message, builtin_types=(bytes,))
    return {key: _shown(value) for key, value in values.items()}


def _shown(value: Any) -> Any:
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, dict):
        return {key: _shown(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_shown(inner) for inner in value]
    return value


async def tail(
    target: Target,
    subject: str | None,
    wanted: Filter,
    *,
    count: int | None = None,
    write: Callable[[str], object] = sys.stdout.write,
) -> None:
    """Print messages until `count` of them were shown (None: for ever)."""
    done = asyncio.Event()
    shown = 0

    async def show(delivery: Delivery) -> None:
        nonlocal shown
        line = line_of(delivery, wanted)
        if line is None or done.is_set():
            return
        write(f"{line}\n")
        shown += 1
        if shown == count:
            done.set()

    async with target.bus() as bus:
        for pattern in patterns(Subjects(target.partition), subject):
            await bus.subscribe(pattern, show)
        await done.wait()
