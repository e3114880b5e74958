"""Questions to the directory and its answers."""

from enum import StrEnum

import msgspec

from schemas.branch import BranchId, BranchInfo, BranchKind, Compaction
from schemas.codec import Count, Decoder, Incarnation, Message, Positive, SmallCount
from schemas.kv import KEY_BYTES, BlockMedia, keys_of


class MatchQuery(Message, frozen=True, kw_only=True):
    """Where does the longest cached prefix of these blocks lie? Registers the prefix as pending under `request`.

    `hashes`: packed short keys of all full blocks of the prompt. Changes no count. `release` True only withdraws
    the pending prefix of `request` (cancelled or failed) and is answered by an empty match. `placed_node` with empty
    `hashes` only tells on which node the pending prefix is computed, and is answered by an empty match too.
    `family`: a session id that several branches share; without `branch`, lineage is inferred among its branches only.
    `media` tells of blocks that hold media, by their number. `router` of life `incarnation` asks: the prefix is pending
    no longer than that life; without, no longer than its lease.
    """

    request: str
    hashes: bytes = b""
    prompt_tokens: Count = 0
    branch: BranchId | None = None
    tenant: str = ""
    version: SmallCount | None = None
    parent: BranchId | None = None
    kind: BranchKind | None = None
    release: bool = False
    placed_node: str | None = None
    family: BranchId | None = None
    compaction: Compaction | None = None
    media: list[BlockMedia] = []
    router: str = ""
    incarnation: Incarnation = 0

    def __post_init__(self) -> None:
        if len(self.hashes) % KEY_BYTES:
            keys_of(self.hashes)


class NodeMatch(msgspec.Struct, frozen=True, kw_only=True):
    """What one node has of the prefix: leading blocks in its own L1, and in its own L2, from block 0 without a gap."""

    node: str
    l1_blocks: Count
    l2_blocks: Count


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks [first, last) of the prefix lie in L2 of `nodes`; pieces join without a gap from block 0."""

    first: Count
    last: Count
    nodes: list[str]


class AbsenceReason(StrEnum):
    """Why a block whose key is known is not supplied: no copy was ever reported, the last one was evicted while nobody
    or while an active branch claimed it, its node is gone, or copies lie beyond a gap."""

    NEVER_STORED = "never_stored"
    EVICTED = "evicted"
    EVICTED_REFERENCED = "evicted_referenced"
    NODE_LOST = "node_lost"
    UNREACHABLE = "unreachable"


class Absence(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks [first, last) of the prefix are known and not supplied."""

    first: Count
    last: Count
    reason: AbsenceReason


class MatchReply(Message, frozen=True, kw_only=True):
    """The placement of the longest prefix that all L2 together supply.

    `branch_blocks`: leading blocks that are also those of the branch's current context (base of its context event).
    `known_blocks`: leading blocks whose keys the directory remembers, resident or not (live ideal hit).
    `pending_blocks`: leading blocks that are there when `pending_request`, computing on `pending_node`, has its prompt.
    `lineage`: what the request is to its branch: extends, opens, fork, subagent, compact, transient. `life`: how often
    the branch had ended when the request arrived. `branch`, `version`, `parent`, `inferred`, `lineage` and `life` are
    to be copied into the request's context event.
    `absent`: why blocks [blocks, known_blocks) are not supplied, in order. `context_blocks`: of the branch's context.
    `referenced_share`: per node the share of blocks in its L2 with a claim.
    """

    blocks: Count
    known_blocks: Count = 0
    branch_blocks: Count = 0
    pieces: list[Piece] = []
    nodes: list[NodeMatch] = []
    pending_blocks: Count = 0
    pending_node: str | None = None
    pending_request: str | None = None
    referenced_share: dict[str, float] = {}
    branch: str | None = None
    version: SmallCount | None = None
    parent: str | None = None
    inferred: bool = False
    lineage: str = ""
    life: SmallCount = 0
    last_prefill_node: str | None = None
    last_decode_node: str | None = None
    blind: bool = False
    error: str = ""
    absent: list[Absence] = []
    context_blocks: Count = 0


class BranchQuery(Message, frozen=True, kw_only=True):
    """One branch, or all of them (`branch` None), newest first."""

    branch: str | None = None
    tenant: str = ""
    limit: Positive = 1000


class BranchReply(Message, frozen=True, kw_only=True):
    branches: list[BranchInfo]


class ReferencesQuery(Message, frozen=True, kw_only=True):
    """A pool that starts asks which of its copies are referenced; the answer comes as a `full` kv.reference, under an
    incarnation that is not below `incarnation`, the highest of a directory that the pool has heard."""

    node: str
    cursor: Count = 0
    incarnation: Incarnation = 0


class StatsReply(Message, frozen=True, kw_only=True):
    """Totals of the directory, and whether it is still blind after a restart.

    `blocks`: keys known. `copies`: block copies in L2 of all nodes, `nodes` per node. `claims`: held by active
    branches, one per block and phase.
    """

    incarnation: Incarnation
    blocks: Count
    copies: Count
    claims: Count
    branches: Count
    active_branches: Count
    pending: Count
    resyncs: Count
    duplicates: Count
    blind: bool
    nodes: dict[str, Count]


MATCH_QUERY = Decoder(MatchQuery)
MATCH_REPLY = Decoder(MatchReply)
BRANCH_QUERY = Decoder(BranchQuery)
BRANCH_REPLY = Decoder(BranchReply)
REFERENCES_QUERY = Decoder(ReferencesQuery)
STATS_REPLY = Decoder(StatsReply)
