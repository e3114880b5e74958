"""Between pools, and between a node's engine and its own pool.

The same messages travel over NATS (`pool.<verb>.<node>`) and over the pool's Unix socket, there framed as
u32 little-endian length + MessagePack of `LocalCall` / `LocalReply`.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from schemas.codec import LARGEST_INT, Count, Decoder, Incarnation, Message, Seconds
from schemas.kv import BlockMedia, BlockSize, LocationChange

DIGEST_BYTES = 32
Address = Annotated[int, Meta(ge=0, le=LARGEST_INT)]


def digests_of(packed: bytes) -> list[bytes]:
    """Split packed 32-byte digests; ValueError unless whole digests."""
    if len(packed) % DIGEST_BYTES:
        raise ValueError(f"{len(packed)} bytes of digests are not a multiple of {DIGEST_BYTES}")
    return [packed[i : i + DIGEST_BYTES] for i in range(0, len(packed), DIGEST_BYTES)]


class SlotInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A committed block in an arena: where, which life of the slot, how long, and the xxh3_128 of its bytes."""

    slot: Count
    generation: Count
    length: Count
    fingerprint: bytes


class LeaseRequest(Message, frozen=True, kw_only=True):
    """Hold the leading run of these blocks that is here, for at most `ttl_s`, so that it can be read.

    `host` names the asker's host: the owner opens its network transport only for askers on another one.
    """

    id: str
    digests: bytes
    ttl_s: Annotated[float, Meta(gt=0, le=600)] = 30.0
    host: str = ""

    def __post_init__(self) -> None:
        digests_of(self.digests)


class LeaseReply(Message, frozen=True, kw_only=True):
    """`slots` of the leading blocks held; fewer than asked is no error. `host` and `arena` let a peer on the same
    host map the arena; `session` and `base_address` are for Mooncake, slot s lies at base_address + s * slot_bytes.
    `layout` says what the bytes mean: a reader whose own differs must not use them."""

    slots: list[SlotInfo]
    incarnation: Incarnation
    host: str = ""
    arena: str = ""
    session: str = ""
    base_address: Address = 0
    slot_bytes: Count = 0
    layout: str = ""
    error: str = ""


class ReleaseRequest(Message, frozen=True, kw_only=True):
    """End a lease or a pin by its id; unknown ids are fine (leases end by themselves)."""

    id: str


class LocateRequest(Message, frozen=True, kw_only=True):
    """How many leading blocks of these are here? Changes neither pins nor recency."""

    digests: bytes

    def __post_init__(self) -> None:
        digests_of(self.digests)


class LocateReply(Message, frozen=True, kw_only=True):
    blocks: Count


class PoolSource(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks [first, last) of the asked digests may be read from `node`."""

    node: str
    first: Count
    last: Count


class FetchRequest(Message, frozen=True, kw_only=True):
    """Bring these blocks into the own arena and pin the leading run under `id` until released.

    `digests` is the whole prefix from block 0. Blocks already here are pinned too. The first `device_blocks` lie in
    the engine's own device memory: they are pinned where they are here, and not missed where they are not. Ends after
    `deadline_s` with what has arrived: late bytes are discarded. `media` tells of blocks that hold media, by their
    number: the pool says so of its copies.
    """

    id: str
    digests: bytes
    sources: list[PoolSource] = []
    deadline_s: Annotated[float, Meta(gt=0, le=1e9)] = 30.0
    device_blocks: Count = 0
    media: list[BlockMedia] = []

    def __post_init__(self) -> None:
        digests_of(self.digests)


class FetchReply(Message, frozen=True, kw_only=True):
    """`blocks` leading blocks are here (or on the device) and pinned; `fetched` of them came from peers. `reason` says
    why not all."""

    blocks: Count
    fetched: Count = 0
    bytes: Count = 0
    took_s: Seconds = 0.0
    transport: str = ""
    reason: str = ""


class AllocateRequest(Message, frozen=True, kw_only=True):
    """Slots to write these blocks into; `parent` is the digest before the first (b"" at the start of a context)."""

    digests: bytes
    parent: bytes = b""

    def __post_init__(self) -> None:
        digests_of(self.digests)
        if len(self.parent) not in (0, DIGEST_BYTES):
            raise ValueError(f"parent of {len(self.parent)} bytes is neither empty nor a digest of {DIGEST_BYTES}")


class AllocateReply(Message, frozen=True, kw_only=True):
    """Per block a (slot, generation) to write, or None: the block is here already or there is no room (`refused`)."""

    slots: list[tuple[Count, Count] | None]
    refused: Count = 0


class CommitRequest(Message, frozen=True, kw_only=True):
    """These slots are written: (slot, generation, length, fingerprint). Slots left out of an allocation are given
    back with `abandon`."""

    slots: list[tuple[Count, Count, Count, bytes]]
    abandon: list[tuple[Count, Count]] = []


class CommitReply(Message, frozen=True, kw_only=True):
    committed: Count


class DeviceChanges(Message, frozen=True, kw_only=True):
    """The engine tells its pool what happened in device memory; the pool numbers and publishes it as tier l1."""

    changes: list[LocationChange]


class AttachRequest(Message, frozen=True, kw_only=True):
    """First call on a connection. `role`: engine (its loss removes all l1 locations) or storage."""

    role: str
    model: str
    block_size: BlockSize
    block_bytes: Count
    key_version: str


class AttachReply(Message, frozen=True, kw_only=True):
    ok: bool
    error: str = ""
    incarnation: Incarnation = 0
    arena: str = ""
    slots: Count = 0
    slot_bytes: Count = 0


class PoolStatus(Message, frozen=True, kw_only=True):
    """What the heartbeat of the node needs from its pool."""

    incarnation: Incarnation
    used_blocks: Count
    total_blocks: Count
    referenced_blocks: Count
    pinned_blocks: Count
    leases: Count
    last_kv_seq: Count


class Empty(Message, frozen=True, kw_only=True):
    """A call without arguments, or an answer without a value."""


class LocalCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call on the Unix socket: `body` is the encoded message of `verb`; `call` matches the reply to it."""

    call: Count
    verb: str
    body: bytes = b""


class LocalReply(msgspec.Struct, frozen=True, kw_only=True):
    call: Count
    body: bytes = b""
    error: str = ""


LEASE_REQUEST = Decoder(LeaseRequest)
LEASE_REPLY = Decoder(LeaseReply)
RELEASE_REQUEST = Decoder(ReleaseRequest)
LOCATE_REQUEST = Decoder(LocateRequest)
LOCATE_REPLY = Decoder(LocateReply)
FETCH_REQUEST = Decoder(FetchRequest)
FETCH_REPLY = Decoder(FetchReply)
ALLOCATE_REQUEST = Decoder(AllocateRequest)
ALLOCATE_REPLY = Decoder(AllocateReply)
COMMIT_REQUEST = Decoder(CommitRequest)
COMMIT_REPLY = Decoder(CommitReply)
DEVICE_CHANGES = Decoder(DeviceChanges)
ATTACH_REQUEST = Decoder(AttachRequest)
ATTACH_REPLY = Decoder(AttachReply)
POOL_STATUS = Decoder(PoolStatus)
EMPTY = Decoder(Empty)
