"""Branch lifecycle events: what a harness, a hook or the router says about a branch."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from schemas.codec import LARGEST_SMALL_COUNT, Count, Decoder, Message, RejectedMessage, SmallCount, UnixTime
from schemas.kv import checked_key, keys_of
from schemas.subjects import tenant_mark

BranchId = Annotated[str, Meta(min_length=1, max_length=256)]
DEFAULT_TENANT = ""
LARGEST_VERSION = LARGEST_SMALL_COUNT
LARGEST_LIFE = LARGEST_SMALL_COUNT


def next_version(version: int) -> int:
    """The version of a context that replaces one of `version`. LARGEST_VERSION has none above it and stays: a later
    context of the branch is told from the earlier by what it contains alone, as where nobody numbers versions."""
    return min(version + 1, LARGEST_VERSION)


class BranchEventType(StrEnum):
    OPEN = "open"
    FORK = "fork"
    SUBAGENT = "subagent"
    COMPACT = "compact"
    END = "end"
    KEEPALIVE = "keepalive"
    CONTEXT = "context"


class BranchKind(StrEnum):
    """What a branch is; `transient` is said of a request only: a side request, never its branch's context by itself."""

    MAIN = "main"
    FORK = "fork"
    SUBAGENT = "subagent"
    TRANSIENT = "transient"


class Compaction(StrEnum):
    """What a harness says with a request when it numbers no versions: `summary` asks for the text that will replace the
    context, `done` is the first request after it was replaced."""

    SUMMARY = "summary"
    DONE = "done"


class BranchState(StrEnum):
    ACTIVE = "active"
    IDLE = "idle"
    ENDED = "ended"


class BranchEvent(Message, frozen=True, kw_only=True):
    """`branch.event`: durable, deduplicated by `id`, ordered within a branch by `version`.

    `context` is published by the router when a request was answered: `tip` is the short key of the last full block of
    prompt and output whose KV exists (all tokens but the last generated one), `blocks` how many full blocks that is.
    `keys` holds the packed short keys of blocks [base_blocks, blocks); the first `base_blocks` are those of the
    branch's former context, so that a directory that lost its state can rebuild every claim from the stream. `base` is
    the short key of block base_blocks - 1, so that they are found even if the branch's context has changed meanwhile.
    `prompt_blocks` (of the prompt alone), `kind` and `parent` are what the request was; `lineage` and `life` are copied
    from the directory's match. `life` tells a late event of an ended branch from a request that opens it anew.
    `finish` is how the answer ended (stop, length, tool_calls; "" where that is not known): what the branch waits for.
    The router says tool_calls if it had read one when the answer ended, else nothing.
    `family` groups branches that share one session id; `compaction` is what the request said of one.
    """

    id: Annotated[str, Meta(min_length=1, max_length=128)]
    t: UnixTime
    branch: BranchId
    type: BranchEventType
    tenant: str = DEFAULT_TENANT
    parent: BranchId | None = None
    version: SmallCount | None = None
    source: str = ""
    cascade: bool = True
    request: str | None = None
    tip: int | None = None
    blocks: SmallCount | None = None
    base_blocks: SmallCount = 0
    base: int | None = None
    keys: bytes = b""
    prompt_blocks: SmallCount | None = None
    kind: BranchKind | None = None
    lineage: str = ""
    finish: str = ""
    life: SmallCount | None = None
    prefill_node: str | None = None
    decode_node: str | None = None
    inferred: bool = False
    family: BranchId | None = None
    compaction: Compaction | None = None

    def __post_init__(self) -> None:
        keys_of(self.keys)
        checked_key(self.tip)
        checked_key(self.base)


class BranchInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One branch as `GET /v1/branches` shows it; `last_seen` in Unix seconds. `confidence`: how sure it is that its
    requests are one branch, 1 where they say so."""

    id: str
    parent: str | None
    kind: BranchKind
    version: SmallCount
    state: BranchState
    inferred: bool
    tokens: Count
    blocks: SmallCount
    last_seen: float
    confidence: float = 1.0


BRANCH_EVENT = Decoder(BranchEvent)


def decode_branch_event(data: bytes, headers: Mapping[str, str], subject: str) -> BranchEvent:
    """A branch event as it arrived: JSON if its content-type header says so, else MessagePack; RejectedMessage.

    The broker lets a client publish the subjects of its tenant only, so an event must be of the tenant of its subject.
    """
    kind = next((value for key, value in headers.items() if key.lower() == "content-type"), "")
    as_json = kind.partition(";")[0].strip().lower() == "application/json"
    event = BRANCH_EVENT.decode_json(data) if as_json else BRANCH_EVENT.decode(data)
    shard = subject.rpartition(".")[2]
    if shard[:-2] != tenant_mark(event.tenant):
        raise RejectedMessage("tenant", f"BranchEvent: tenant {event.tenant!r} does not speak on {subject}")
    return event
