"""The reading and writing side of an arena: what an engine's storage class and the pools of the same host use."""

import mmap
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.pool import DIGEST_BYTES, SlotInfo
from services.arena.layout import (
    HEADER,
    LIFE,
    LIFE_OFFSET,
    PAGE,
    SEQUENCE_OFFSET,
    ArenaError,
    ArenaLayout,
    SlotState,
    fingerprint_of,
)

Bytes = npt.NDArray[np.uint8]
_WORD = struct.Struct("<Q")
_LIVE = struct.Struct("<8xI4xQ")
_FINGERPRINT = slice(64, 80)
_LOOKUP_TRIES = 16


class ArenaReader:
    """One mapping of an arena: look up blocks, copy them out, fill slots that the pool gave out.

    Safe to use from several threads. ArenaError if `path` is no live arena. `writable` maps the data for `write`.
    The mapping lives until the last array over it is gone, `close` or not.
    """

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        descriptor = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            size = os.fstat(descriptor).st_size
            self.layout = ArenaLayout.parse(os.pread(descriptor, PAGE, 0), size)
            if not self.layout.live:
                raise ArenaError(f"the arena at {path} is not live: its pool is starting, or has left it")
            access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            self._map = mmap.mmap(descriptor, size, prot=access)
        finally:
            os.close(descriptor)
        layout = self.layout
        whole = np.frombuffer(self._map, np.uint8)
        self._index = whole[layout.index_offset :][: 4 * layout.buckets].view("<u4")
        self._buckets = memoryview(self._map)[layout.index_offset :][: 4 * layout.buckets].cast("I")
        self._headers = whole[layout.headers_offset :][: HEADER.itemsize * layout.slots].view(HEADER)
        self._first_words = self._headers["digest"][:, 0]
        self._data = whole[layout.data_offset :].reshape(layout.slots, layout.slot_bytes)

    @property
    def live(self) -> bool:
        """False once the pool has abandoned this file or a later life of the pool owns it: map the path again."""
        live, incarnation = _LIVE.unpack_from(self._map)
        return bool(live == 1 and incarnation == self.layout.incarnation)

    def find(self, digest: bytes) -> SlotInfo | None:
        """Where the block of this digest lies, or None. Changes nothing in the pool."""
        mask = self.layout.buckets - 1
        for _ in range(_LOOKUP_TRIES):
            before = self._sequence()
            bucket = int.from_bytes(digest[:8], "little") & mask
            while entry := self._buckets[bucket]:
                header = self._map[(at := self._header(entry - 1)) : at + HEADER.itemsize]
                generation, length, state = LIFE.unpack_from(header, LIFE_OFFSET)
                if header[:DIGEST_BYTES] == digest and state >= SlotState.COMMITTED:
                    fingerprint = header[_FINGERPRINT]
                    return SlotInfo(slot=entry - 1, generation=generation, length=length, fingerprint=fingerprint)
                bucket = (bucket + 1) & mask
            if before % 2 == 0 and self._sequence() == before:
                break
        return None

    def lookup(self, digests: bytes) -> list[SlotInfo]:
        """The slots of the leading blocks of packed `digests` that are here. Changes nothing in the pool."""
        keys = np.frombuffer(digests, "<u8").reshape(-1, DIGEST_BYTES // 8)
        for _ in range(_LOOKUP_TRIES):
            before = self._sequence()
            records, slots = self._probe(keys)
            if len(slots) == len(keys) or (before % 2 == 0 and self._sequence() == before):
                break
        prints = records["fingerprint"].tobytes()
        columns = (slots.tolist(), records["generation"].tolist(), records["length"].tolist(), range(len(slots)))
        return [
            SlotInfo(slot=slot, generation=generation, length=length, fingerprint=prints[16 * i : 16 * i + 16])
            for slot, generation, length, i in zip(*columns, strict=True)
        ]

    def _sequence(self) -> int:
        value: int = _WORD.unpack_from(self._map, SEQUENCE_OFFSET)[0]
        return value

    def _probe(self, keys: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Headers (copied) and slots of the leading run of `keys`, by linear probing of all keys at once.

        No two digests in an arena have the same first word, so a slot that has it is the only one to look at.
        """
        mask = self.layout.buckets - 1
        bucket = (keys[:, 0] & np.uint64(mask)).astype(np.int64)
        slots = np.zeros(len(keys), np.int64)
        end = len(keys)
        open_ = np.arange(end)
        while len(open_):
            entry = self._index[bucket[open_]].astype(np.int64)
            if not entry.all():  # an empty bucket ends the probe: that key is not here, nor any run beyond it
                end = min(end, int(open_[entry == 0][0]))
                keep = open_ < end
                open_, entry = open_[keep], entry[keep]
            match = self._first_words[entry - 1] == keys[open_, 0]
            slots[open_[match]] = entry[match] - 1
            open_ = open_[~match]
            bucket[open_] = (bucket[open_] + 1) & mask
        records = self._headers[slots[:end]]
        right = (records["digest"] == keys[:end]).all(axis=1) & (records["state"] >= SlotState.COMMITTED)
        if not right.all():
            end = int(np.argmin(right))
        return records[:end], slots[:end]

    def life(self, slot: int) -> tuple[int, int, SlotState]:
        """Generation, length in bytes and state of a slot, now."""
        generation, length, state = LIFE.unpack_from(self._map, self._header(slot) + LIFE_OFFSET)
        return generation, length, SlotState(state)

    def _header(self, slot: int) -> int:
        if not 0 <= slot < self.layout.slots:
            raise ValueError(f"slot {slot} is not in 0..{self.layout.slots - 1}")
        return self.layout.headers_offset + slot * HEADER.itemsize

    def view(self, slot: int) -> Bytes:
        """The bytes of a slot, uint8 of `slot_bytes`, in place. Ask `current` after reading from it."""
        self._header(slot)
        data: Bytes = self._data[slot]
        return data

    def current(self, slot: int, generation: int, digest: bytes | None = None) -> bool:
        """Whether the slot still holds the committed block it held in this generation, and it is that of `digest`."""
        now, _, state = self.life(slot)
        same = digest is None or self._headers[slot]["digest"].tobytes() == digest
        return same and now == generation and state >= SlotState.COMMITTED

    def read_into(self, slot: int, generation: int, buffer: Any) -> bool:
        """Copy a block into `buffer`; False if it was not, or did not stay, the block of this generation.

        After False the buffer's content is undefined. ValueError if the buffer is smaller than the block.
        """
        now, length, state = self.life(slot)
        if now != generation or state < SlotState.COMMITTED:
            return False
        target = np.frombuffer(buffer, np.uint8)
        if length > len(target):
            raise ValueError(f"block of {length} bytes, buffer of {len(target)}")
        np.copyto(target[:length], self._data[slot, :length])
        expected = self._headers[slot]["fingerprint"].tobytes() if state is SlotState.ADOPTED else None
        return self.current(slot, generation) and expected in (None, fingerprint_of(target[:length]))

    def write(self, slot: int, generation: int, buffer: Any) -> bytes | None:
        """Fill a slot the pool gave out in this generation; its fingerprint for the commit, None if it was taken back.

        ValueError if the buffer is larger than a slot. Needs a writable mapping.
        """
        source = np.frombuffer(buffer, np.uint8)
        if len(source) > self.layout.slot_bytes:
            raise ValueError(f"block of {len(source)} bytes, slots have {self.layout.slot_bytes}")
        now, _, state = self.life(slot)
        if now != generation or state is not SlotState.WRITING:
            return None
        target = self._data[slot, : len(source)]
        np.copyto(target, source)
        return fingerprint_of(target)

    def close(self) -> None:
        """Let go of the mapping; any later call fails."""
        del self._index, self._buckets, self._first_words, self._headers, self._data, self._map
