"""The arena of a node's KV pool as its readers and writers map it: one plain file, one slot per block.

    page 0: numbers, seqlock, identity | index: u32 per bucket | headers: 128 bytes per slot | media: 64 bytes per slot
    | data: page-aligned slots

Only the pool writes what comes before the data. A writer fills the data of slots the pool gave it; whoever maps the
file may look up and copy blocks without asking the pool. Every answer is checked against the slot's own header, so a
reader that races the pool sees a miss, never another block's bytes.
"""

import struct
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
import xxhash

MAGIC = b"EIARENA\x02"
PAGE = 4096
NUMBERS = struct.Struct("<8sIIQQQQQQQQI")
LIVE_OFFSET = 8
SEQUENCE_OFFSET = 128
IDENTITY_OFFSET = 256
HEADER = np.dtype(
    {
        "names": ["digest", "parent", "fingerprint", "generation", "length", "state"],
        "formats": [("<u8", 4), ("<u8", 4), "V16", "<u8", "<u8", "<u4"],
        "offsets": [0, 32, 64, 80, 88, 96],
        "itemsize": 128,
    }
)
MEDIA_BYTES = 64
"""The sha256 of one or two media that stand in the block of a slot; zeros for a block with none, or with more."""
LIFE = struct.Struct("<QQI")
LIFE_OFFSET = 80


class SlotState(IntEnum):
    """FREE and WRITING slots hold nothing to read; ADOPTED ones were committed by a former pool process and their
    fingerprint is checked at every read until the pool has checked it once."""

    FREE = 0
    WRITING = 1
    COMMITTED = 2
    ADOPTED = 3


class ArenaError(Exception):
    """A file that is not the arena it should be; the text names both values."""


class ArenaIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What the bytes in an arena mean. Arenas that differ in any of it must not exchange blocks."""

    model: str
    block_size: int
    block_bytes: int
    key_version: str

    def __str__(self) -> str:
        return f"{self.model} block_size={self.block_size} block_bytes={self.block_bytes} keys={self.key_version}"


class ArenaLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Page 0 in words; offsets and sizes in bytes. `live` is False while the pool builds or has abandoned the file."""

    live: bool
    incarnation: int
    slots: int
    slot_bytes: int
    buckets: int
    index_offset: int
    headers_offset: int
    data_offset: int
    total_bytes: int
    identity: ArenaIdentity

    @classmethod
    def plan(cls, identity: ArenaIdentity, slots: int, incarnation: int) -> "ArenaLayout":
        """The layout of a new arena: at most a quarter of the index is ever used, so that probes are short."""
        buckets = max(64, 1 << (4 * slots - 1).bit_length())
        slot_bytes = _up(identity.block_bytes, PAGE)
        headers_offset = PAGE + _up(4 * buckets, PAGE)
        data_offset = headers_offset + _up(HEADER.itemsize * slots, PAGE) + _up(MEDIA_BYTES * slots, PAGE)
        return cls(
            live=False,
            incarnation=incarnation,
            slots=slots,
            slot_bytes=slot_bytes,
            buckets=buckets,
            index_offset=PAGE,
            headers_offset=headers_offset,
            data_offset=data_offset,
            total_bytes=data_offset + slots * slot_bytes,
            identity=identity,
        )

    @classmethod
    def parse(cls, page: bytes, size: int) -> "ArenaLayout":
        """Read page 0 of a file of `size` bytes; ArenaError unless it describes exactly such a file."""
        if len(page) < PAGE or page[:8] != MAGIC:
            raise ArenaError(f"no arena: the file starts with {page[:8]!r}, an arena with {MAGIC!r}")
        numbers = NUMBERS.unpack_from(page)
        try:
            identity = msgspec.msgpack.decode(page[IDENTITY_OFFSET:][: numbers[11]], type=ArenaIdentity)
        except msgspec.MsgspecError as error:
            raise ArenaError(f"the arena's identity cannot be read: {error}") from error
        keys = ("incarnation", "slots", "slot_bytes", "buckets", "index_offset", "headers_offset", "data_offset")
        found = cls(
            live=numbers[1] == 1,
            total_bytes=numbers[10],
            identity=identity,
            **dict(zip(keys, numbers[3:10], strict=True)),
        )
        planned = msgspec.structs.replace(cls.plan(identity, found.slots, found.incarnation), live=found.live)
        if found != planned or found.total_bytes != size:
            raise ArenaError(f"the arena describes {found} in {size} bytes, this version lays it out as {planned}")
        return found

    @property
    def media_offset(self) -> int:
        return self.headers_offset + _up(HEADER.itemsize * self.slots, PAGE)

    def page(self) -> bytes:
        """Page 0 as `parse` reads it, with the seqlock at 0."""
        identity = msgspec.msgpack.encode(self.identity)
        if len(identity) > PAGE - IDENTITY_OFFSET:
            raise ArenaError(f"the identity takes {len(identity)} bytes, page 0 has room for {PAGE - IDENTITY_OFFSET}")
        page = bytearray(PAGE)
        numbers = (self.incarnation, self.slots, self.slot_bytes, self.buckets, self.index_offset)
        offsets = (self.headers_offset, self.data_offset, self.total_bytes)
        NUMBERS.pack_into(page, 0, MAGIC, int(self.live), 0, *numbers, *offsets, len(identity))
        page[IDENTITY_OFFSET : IDENTITY_OFFSET + len(identity)] = identity
        return bytes(page)


def fingerprint_of(data: Any) -> bytes:
    """The xxh3_128 digest of a buffer, 16 bytes; the GIL is released while it runs."""
    return bytes(xxhash.xxh3_128_digest(data))


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
