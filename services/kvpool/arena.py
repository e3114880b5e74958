"""The pool's side of its arena: creates the file or adopts what a former life left, and keeps headers and index."""

import contextlib
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.kv import SHA256_BYTES
from schemas.pool import DIGEST_BYTES
from services.arena import ArenaIdentity, ArenaLayout, SlotState, fingerprint_of
from services.arena.layout import HEADER, LIFE, LIFE_OFFSET, LIVE_OFFSET, MEDIA_BYTES, PAGE, SEQUENCE_OFFSET
from services.kvpool.arena_file import open_file
from services.kvpool.core.blocks import AdoptedBlock, Effects

PREFAULT_BYTES = 1 << 30
_WORD = struct.Struct("<Q")
_STATE = struct.Struct("<I")
_STATE_OFFSET = LIFE_OFFSET + 16
_FINGERPRINT_OFFSET = 64
_LENGTH_OFFSET = LIFE_OFFSET + 8
_NO_DIGEST = bytes(DIGEST_BYTES)
_NO_MEDIA = bytes(MEDIA_BYTES)


@dataclass(frozen=True)
class Found:
    """What an arena held when it was opened: the generation of every slot, blocks, and slots left half-written."""

    generations: list[int]
    blocks: list[AdoptedBlock]
    torn: list[int]


class Arena:
    """The one writer of an arena's headers and index. No reader sees it before `go_live`."""

    def __init__(self, path: Path, descriptor: int, layout: ArenaLayout) -> None:
        self.path, self.layout = path, layout
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, layout.total_bytes)
        whole = np.frombuffer(self._map, np.uint8)
        _prefault(whole)
        self._headers: npt.NDArray[Any] = whole[layout.headers_offset :][: HEADER.itemsize * layout.slots].view(HEADER)
        self._data = whole[layout.data_offset :].reshape(layout.slots, layout.slot_bytes)
        self._index = memoryview(self._map)[layout.index_offset :][: 4 * layout.buckets].cast("I")
        self._mask = layout.buckets - 1

    @classmethod
    def open(
        cls, path: Path, identity: ArenaIdentity, slots: int, incarnation: int, *, reset: bool = False
    ) -> tuple["Arena", Found]:
        """Adopt the arena at `path`, or create it. The new life is above the one that left it: `incarnation`, or just
        above that one's. ArenaError as `open_file` says."""
        descriptor, layout, adopted = open_file(path, ArenaLayout.plan(identity, slots, incarnation), reset=reset)
        try:
            arena = cls(path, descriptor, layout)
        except BaseException:
            os.close(descriptor)
            raise
        return arena, arena._scan() if adopted else Found([0] * slots, [], [])

    def _scan(self) -> Found:
        """Empty the index, mark committed blocks as adopted, and list them."""
        np.frombuffer(self._map, np.uint8)[self.layout.index_offset : self.layout.headers_offset] = 0
        headers = self._headers.copy()
        torn = np.flatnonzero(headers["state"] == SlotState.WRITING)
        whole = (headers["state"] >= SlotState.COMMITTED) & (headers["length"] <= self.layout.slot_bytes)
        slots = np.flatnonzero(whole)
        self._headers["state"][~whole & (headers["state"] != SlotState.WRITING)] = SlotState.FREE
        self._headers["state"][slots] = SlotState.ADOPTED
        blocks = [self._adopted(int(slot), headers[slot]) for slot in slots]
        return Found(headers["generation"].tolist(), blocks, torn.tolist())

    def _adopted(self, slot: int, header: Any) -> AdoptedBlock:
        at, parent = self._media(slot), header["parent"].tobytes()
        shown = [self._map[first : first + SHA256_BYTES] for first in range(at, at + MEDIA_BYTES, SHA256_BYTES)]
        return AdoptedBlock(
            slot=slot,
            digest=header["digest"].tobytes(),
            parent=b"" if parent == _NO_DIGEST else parent,
            length=int(header["length"]),
            fingerprint=header["fingerprint"].tobytes(),
            media=b"".join(sha256 for sha256 in shown if any(sha256)),
        )

    def go_live(self, blocks: list[AdoptedBlock], effects: Effects) -> None:
        """Let readers in: to the adopted `blocks`, but for those that `effects` frees."""
        left = set(effects.freed)
        with self._changing():
            for block in blocks:
                if block.slot not in left:
                    self._enter(block.slot)
            for slot in left:
                self._set_state(slot, SlotState.FREE)
        _STATE.pack_into(self._map, LIVE_OFFSET, 1)

    def leave(self) -> None:
        """Close the file and let another pool adopt it; readers see that it is left."""
        _STATE.pack_into(self._map, LIVE_OFFSET, 0)
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # the mapping keeps a descriptor, and with it the lock, of its own
        os.close(self._descriptor)

    def remove(self) -> None:
        """Leave the arena for good: the file is gone, its memory with the last mapping."""
        self.leave()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def perform(self, effects: Effects) -> None:
        """Carry out what the core decided; readers that look up meanwhile look again."""
        if effects.freed or effects.committed:
            with self._changing():
                for slot in effects.freed:
                    self._set_state(slot, SlotState.FREE)
                    self._take_out(slot)
                self._begin(effects)
                for slot, length, fingerprint in effects.committed:
                    self._commit(slot, length, fingerprint)
        else:
            self._begin(effects)
        for slot, shown in effects.shown:
            at = self._media(slot)
            kept = shown if len(shown) <= MEDIA_BYTES else b""
            self._map[at : at + MEDIA_BYTES] = kept.ljust(MEDIA_BYTES, b"\0")

    def _begin(self, effects: Effects) -> None:
        for slot, generation, digest, parent in effects.begun:
            at = self._header(slot)
            LIFE.pack_into(self._map, at + LIFE_OFFSET, generation, 0, SlotState.WRITING)
            self._map[at : at + 2 * DIGEST_BYTES] = digest + (parent or _NO_DIGEST)
            media = self._media(slot)
            self._map[media : media + MEDIA_BYTES] = _NO_MEDIA

    def _commit(self, slot: int, length: int, fingerprint: bytes) -> None:
        at = self._header(slot)
        self._map[at + _FINGERPRINT_OFFSET : at + _FINGERPRINT_OFFSET + len(fingerprint)] = fingerprint
        _WORD.pack_into(self._map, at + _LENGTH_OFFSET, length)
        self._set_state(slot, SlotState.COMMITTED)
        self._enter(slot)

    def _header(self, slot: int) -> int:
        return self.layout.headers_offset + slot * HEADER.itemsize

    def _media(self, slot: int) -> int:
        return self.layout.media_offset + slot * MEDIA_BYTES

    def _set_state(self, slot: int, state: SlotState) -> None:
        _STATE.pack_into(self._map, self._header(slot) + _STATE_OFFSET, state)

    # the index: linear probing from the home of a digest; taking out moves later entries up, so no gaps stay

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """The sequence number is odd while the index changes."""
        sequence = _WORD.unpack_from(self._map, SEQUENCE_OFFSET)[0]
        odd = sequence | 1
        _WORD.pack_into(self._map, SEQUENCE_OFFSET, odd)
        yield
        _WORD.pack_into(self._map, SEQUENCE_OFFSET, odd + 1)

    def _home(self, slot: int) -> int:
        first: int = _WORD.unpack_from(self._map, self._header(slot))[0]
        return first & self._mask

    def _enter(self, slot: int) -> None:
        bucket = self._home(slot)
        while self._index[bucket]:
            bucket = (bucket + 1) & self._mask
        self._index[bucket] = slot + 1

    def _take_out(self, slot: int) -> None:
        bucket = self._home(slot)
        while self._index[bucket] != slot + 1:
            if not self._index[bucket]:
                return  # was never committed
            bucket = (bucket + 1) & self._mask
        at = bucket
        while True:
            at = (at + 1) & self._mask
            entry = self._index[at]
            if not entry:
                break
            # an entry may move up to `bucket` unless its home lies behind it: in (bucket, at]
            if (at - self._home(entry - 1)) & self._mask >= (at - bucket) & self._mask:
                self._index[bucket] = entry
                bucket = at
        self._index[bucket] = 0

    # the data

    def view(self, slot: int) -> npt.NDArray[np.uint8]:
        """The bytes of a slot, uint8 of `slot_bytes`, in place."""
        data: npt.NDArray[np.uint8] = self._data[slot]
        return data

    @property
    def data_address(self) -> int:
        """Where slot 0 lies in this process; slot s follows s * slot_bytes later."""
        address: int = self._data.ctypes.data
        return address

    @property
    def data_bytes(self) -> int:
        return int(self._data.nbytes)

    def matches(self, slot: int, length: int, fingerprint: bytes) -> bool:
        """Whether the bytes in a slot are those of this fingerprint."""
        return fingerprint_of(self._data[slot, :length]) == fingerprint

    def mark_verified(self, slot: int) -> None:
        """An adopted block was checked: readers need not check it again."""
        self._set_state(slot, SlotState.COMMITTED)

    def check(self) -> None:
        """The index leads to exactly the committed slots."""
        committed = set(np.flatnonzero(self._headers["state"] >= SlotState.COMMITTED).tolist())
        entries = [entry - 1 for entry in self._index if entry]
        assert len(set(entries)) == len(entries), "a slot is in the index twice"
        assert set(entries) == committed, "index and headers differ"
        for slot in entries:
            bucket = self._home(slot)
            while self._index[bucket] != slot + 1:
                assert self._index[bucket], f"slot {slot} cannot be found from its home"
                bucket = (bucket + 1) & self._mask


def _prefault(mapped: npt.NDArray[np.uint8]) -> None:
    """Touch every page once, without the GIL: a first copy into the arena is then as fast as any."""
    for start in range(0, len(mapped), PREFAULT_BYTES):
        mapped[start : start + PREFAULT_BYTES : PAGE].max()
