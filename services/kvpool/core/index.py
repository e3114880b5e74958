"""Which block is in which slot: short key to slot, and what is known of the block there."""

from array import array
from collections.abc import Iterable

import numpy as np

from schemas.block_key import short_key
from schemas.pool import DIGEST_BYTES, SlotInfo

FINGERPRINT_BYTES = 16


def keys_of_digests(digests: bytes) -> list[int]:
    """The short keys of packed digests."""
    keys: list[int] = np.frombuffer(digests, ">u8")[:: DIGEST_BYTES // 8].tolist()
    return keys


class BlockIndex:
    """The blocks of one pool, written or being written. Two digests of one short key cannot be here at once.

    Location and reference messages name blocks by short key, so a second digest of the same key could not be told
    from the first, and the pool refuses it.
    """

    def __init__(self, slots: int) -> None:
        self.slot_of: dict[int, int] = {}
        self.keys = array("Q", bytes(8 * slots))
        self.parents = array("Q", bytes(8 * slots))
        """Short key of the block before, 0 at the start of a context."""
        self.lengths = array("Q", bytes(8 * slots))
        self._digests = bytearray(DIGEST_BYTES * slots)
        self._digests_of = np.frombuffer(self._digests, "<u8").reshape(-1, DIGEST_BYTES // 8)
        self._fingerprints = bytearray(FINGERPRINT_BYTES * slots)
        self._waiting: dict[int, dict[int, None]] = {}

    def __len__(self) -> int:
        return len(self.slot_of)

    def find(self, digest: bytes) -> int | None:
        """The slot of a block."""
        slot = self.slot_of.get(short_key(digest))
        return slot if slot is not None and self.digest(slot) == digest else None

    def find_all(self, digests: bytes) -> list[int | None]:
        """The slot of each of these packed digests."""
        found = list(map(self.slot_of.get, keys_of_digests(digests)))
        asked = np.frombuffer(digests, "<u8").reshape(-1, DIGEST_BYTES // 8)
        at = None
        if None in found:
            present = [(i, slot) for i, slot in enumerate(found) if slot is not None]
            if not present:
                return found
            at, slots = np.array(present).T
            asked = asked[at]
        else:
            slots = np.array(found, np.intp)
        differs = (asked != self._digests_of[slots]).any(axis=1)
        if differs.any():
            for i in np.flatnonzero(differs).tolist():
                found[i if at is None else at[i]] = None
        return found

    def digest(self, slot: int) -> bytes:
        return bytes(self._digests[DIGEST_BYTES * slot : DIGEST_BYTES * (slot + 1)])

    def parent_key(self, slot: int) -> int | None:
        """The short key of the block before this one, None at the start of a context."""
        return self.parents[slot] or None

    def insert(self, slot: int, key: int, digest: bytes, parent: int) -> tuple[int | None, Iterable[int]]:
        """A block comes to `slot`; `parent` is the key before it, 0 for none.

        Returns the slot of the block before it, if that is here, and the slots of those here that come after it.
        """
        self.slot_of[key] = slot
        self.keys[slot] = key
        self.parents[slot] = parent
        self._digests[DIGEST_BYTES * slot : DIGEST_BYTES * (slot + 1)] = digest
        before = self.slot_of.get(parent) if parent else None
        if parent and before is None:
            self._waiting.setdefault(parent, {})[slot] = None
        return before, self._waiting.pop(key, ()) if self._waiting else ()

    def seal(self, slot: int, length: int, fingerprint: bytes) -> None:
        """What was written: bytes, and their xxh3_128."""
        self.lengths[slot] = length
        self._fingerprints[FINGERPRINT_BYTES * slot : FINGERPRINT_BYTES * (slot + 1)] = fingerprint

    def remove(self, slot: int, orphans: list[int]) -> None:
        """The block leaves `slot`; `orphans` came after it and stay."""
        key = self.keys[slot]
        del self.slot_of[key]
        waiting = self._waiting.get(self.parents[slot]) if self._waiting else None
        if waiting is not None and slot in waiting:
            del waiting[slot]
            if not waiting:
                del self._waiting[self.parents[slot]]
        if orphans:
            self._waiting[key] = dict.fromkeys(orphans)

    def info(self, slot: int, generation: int) -> SlotInfo:
        """What a reader needs to know of the committed block in `slot`."""
        return SlotInfo(
            slot=slot,
            generation=generation,
            length=self.lengths[slot],
            fingerprint=bytes(self._fingerprints[FINGERPRINT_BYTES * slot : FINGERPRINT_BYTES * (slot + 1)]),
        )

    def check(self) -> None:
        """Keys and slots name each other; waiting blocks wait for what is not here."""
        assert len(set(self.slot_of.values())) == len(self.slot_of), "two keys in one slot"
        for key, slot in self.slot_of.items():
            assert self.keys[slot] == key == short_key(self.digest(slot)), f"slot {slot} does not hold key {key}"
        for key, slots in self._waiting.items():
            assert key not in self.slot_of, f"blocks wait for key {key}, which is here"
            assert slots, f"key {key} is waited for by nobody"
            assert all(self.parents[slot] == key and self.slot_of[self.keys[slot]] == slot for slot in slots)
