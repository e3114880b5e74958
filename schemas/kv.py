"""Where KV lies: location events, snapshots, reference events, and the hello of a node."""

from enum import StrEnum
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from schemas.codec import Count, Decoder, Incarnation, Message, Positive

KEY_BYTES = 8
SHA256_BYTES = 32
NEUTRAL = 128
"""What a copy is worth of which nobody said more."""
MOST_BLOCK_TOKENS = 1 << 20
BlockSize = Annotated[int, Meta(ge=1, le=MOST_BLOCK_TOKENS)]
"""Tokens a block."""


class Tier(StrEnum):
    """L1 is device memory, L2 the node's host memory."""

    L1 = "l1"
    L2 = "l2"


class ChangeType(StrEnum):
    STORED = "stored"
    REMOVED = "removed"
    MOVED = "moved"
    CLEARED = "cleared"


def keys_of(packed: bytes) -> npt.NDArray[np.uint64]:
    """View packed little-endian short keys as an array; ValueError unless whole keys."""
    if len(packed) % KEY_BYTES:
        raise ValueError(f"{len(packed)} bytes of keys are not a multiple of {KEY_BYTES}")
    return np.frombuffer(packed, dtype="<u8")


def checked_key(key: int | None) -> int | None:
    """Return a short key if it is one; ValueError unless 0 <= key < 2**64."""
    if key is not None and not 0 <= key < 1 << 8 * KEY_BYTES:
        raise ValueError(f"key {key} is not a uint64")
    return key


class BlockMedia(msgspec.Struct, frozen=True, array_like=True):
    """The sha256 of each medium that stands in block number `block` of a run or a prompt, one after another."""

    block: Count
    sha256: bytes

    def __post_init__(self) -> None:
        if len(self.sha256) % SHA256_BYTES:
            raise ValueError(f"{len(self.sha256)} bytes of sha256 are not a multiple of {SHA256_BYTES}")


class LocationChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run of blocks that came to, left or moved between tiers of one node.

    `hashes` are packed short keys in chain order; `parent` is the short key of the block before the first, None at the
    start of a context. `moved` names the tier it left in `from`. `cleared` empties `tier` and has no hashes. `media`
    tells of blocks that hold media, by their number among the hashes.
    """

    type: ChangeType
    tier: Tier
    hashes: bytes = b""
    parent: int | None = None
    origin: Tier | None = msgspec.field(default=None, name="from")
    media: list[BlockMedia] = []

    def __post_init__(self) -> None:
        if len(self.hashes) % KEY_BYTES:
            keys_of(self.hashes)
        if self.parent is not None:
            checked_key(self.parent)


class TierTotal(msgspec.Struct, frozen=True, kw_only=True):
    """What a tier holds: how many blocks, and the exclusive or of their short keys."""

    blocks: Count
    digest: int

    def __post_init__(self) -> None:
        checked_key(self.digest)


class KvLocation(Message, frozen=True, kw_only=True):
    """`kv.location`: changes of one node in order; a gap in `seq` within an incarnation is repaired by snapshot.

    Every message with changes raises `seq` by one. Once a second a message without changes repeats the last `seq`:
    the heartbeat of the node's pool, from which lost messages and dead pools are noticed. It carries what the tiers
    hold as of `seq`; whoever has heard all messages and counts otherwise asks for a snapshot.
    """

    node: str
    incarnation: Incarnation
    seq: Count
    changes: list[LocationChange]
    l1: TierTotal | None = None
    l2: TierTotal | None = None


class SnapshotRequest(Message, frozen=True, kw_only=True):
    """Ask a node for everything it holds; `cursor` 0 starts, the answer names the next one."""

    cursor: Count = 0
    snapshot: str | None = None


class SnapshotPart(Message, frozen=True, kw_only=True):
    """One part of a node's holdings as of `seq`; `next_cursor` None ends it. Parts of one snapshot share its id."""

    node: str
    incarnation: Incarnation
    seq: Count
    snapshot: str
    changes: list[LocationChange]
    next_cursor: Count | None = None


class ReferenceChange(msgspec.Struct, frozen=True, kw_only=True):
    """Copies on one node whose claim count went from zero to positive or back.

    `unreachable`: the cluster can no longer reach block 0 from these copies, so they go before all others.
    """

    referenced: bool
    hashes: bytes
    unreachable: bool = False

    def __post_init__(self) -> None:
        keys_of(self.hashes)


class ValueChange(msgspec.Struct, frozen=True, kw_only=True):
    """What copies on one node are worth while they are referenced, or while they are not: among copies of equal rank
    those of the smallest value go first. NEUTRAL where nothing was said; void when the copy's `referenced` changes."""

    value: Annotated[int, Meta(ge=0, le=255)]
    referenced: bool
    hashes: bytes

    def __post_init__(self) -> None:
        keys_of(self.hashes)


class KvReference(Message, frozen=True, kw_only=True):
    """`kv.reference`: directory to a node's pool; eviction there follows it. `full` replaces all the pool knew.

    `changes` are applied before `values`.
    """

    node: str
    incarnation: Incarnation
    seq: Count
    full: bool = False
    changes: list[ReferenceChange]
    values: list[ValueChange] = []


class Capacities(msgspec.Struct, frozen=True, kw_only=True):
    l1_tokens: Count
    l2_tokens: Count
    running: Count = 0


class NodeHello(Message, frozen=True, kw_only=True):
    """`node.hello`: what a node is. One whose model, block size, key version or layout differs is refused by name.

    `experts_per_token` of `experts` routed ones: k and E of the decode model, 0 for a dense model. `batch_tokens`:
    uncached tokens one prefill iteration takes at most, 0 where it is not known.
    """

    node: str
    incarnation: Incarnation
    engine_incarnation: Incarnation
    model: str
    block_size: BlockSize
    key_version: str
    ranks: Positive
    engine: str
    dtype: str
    capacities: Capacities
    transfer: str
    rendezvous: str = ""
    max_context_tokens: Count = 0
    tokenizer: str = ""
    experts_per_token: Count = 0
    experts: Count = 0
    batch_tokens: Count = 0


KV_LOCATION = Decoder(KvLocation)
SNAPSHOT_REQUEST = Decoder(SnapshotRequest)
SNAPSHOT_PART = Decoder(SnapshotPart)
KV_REFERENCE = Decoder(KvReference)
NODE_HELLO = Decoder(NodeHello)
