"""`ei tail`: messages of the bus as they pass, decoded."""

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from schemas.branch import BranchEvent, decode_branch_event
from schemas.channels import CHANNELS
from schemas.codec import Decoder, RejectedMessage
from schemas.subjects import Subject, Subjects, parse
from services.bus import Delivery
from services.cli.connection import CommandError, Target


def _kind(subject: Subject) -> tuple[str, str, str | None]:
    """What the type of a message follows from; of a question the verb too, which stands where others name an entity."""
    return subject.topic, subject.event, subject.entity if subject.topic == "query" else None


DECODERS: dict[tuple[str, str, str | None], Decoder[Any]] = {
    _kind(parse(channel.address)): Decoder(channel.message) for channel in CHANNELS if channel.message is not None
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
    decoder = DECODERS.get(_kind(subject))
    if decoder is None:
        content: dict[str, Any] = {"bytes": len(delivery.data)}
    else:
        try:
            content = _plain(_decoded(decoder, delivery))
        except RejectedMessage as rejected:
            content = {"rejected": rejected.reason, "error": str(rejected)}
    if not wanted.takes(subject.entity, content):
        return None
    return f"{delivery.subject} {msgspec.json.encode(content).decode()}"


def _decoded(decoder: Decoder[Any], delivery: Delivery) -> Any:
    if decoder.kind is BranchEvent:
        return decode_branch_event(delivery.data, delivery.headers, delivery.subject)
    return decoder.decode(delivery.data)


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
    """Print messages until `count` of them were shown (None: for ever). CommandError where the key may not listen."""
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
        if refused := bus.refusals():
            raise CommandError(f"{target.nats_url}: {', '.join(refused)}; EI_NATS_NKEY or --port names another key")
        await done.wait()
