"""Which keys are certainly in no run: one bit for the first bits of each key, so that a new key is not looked for."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

LEAST_BITS = 20
FULL_SHARE = 4
"""A table with a key for every so many bits is full, and made anew."""
ROOM = 16
"""Bits a key of a table that is made anew."""
PIECE_KEYS = 1 << 15

_U64 = npt.NDArray[np.uint64]


class _Table:
    """2**bits bits; a key sets the one that its first bits name."""

    __slots__ = ("_set", "_shift", "bits", "view")

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self._shift = np.uint64(64 - bits)
        self._set = np.zeros(1 << (bits - 3), np.uint8)
        self.view = self._set.data

    def add(self, keys: _U64) -> None:
        """Keys in ascending order."""
        slots = (keys >> self._shift).view(np.int64)
        at, bit = slots >> 3, np.left_shift(np.uint8(1), (slots & 7).astype(np.uint8))
        self._set[at] |= bit
        shared = np.flatnonzero(at[1:] == at[:-1])  # of those that share a byte only the last was set
        if len(shared):
            np.bitwise_or.at(self._set, at[shared], bit[shared])


class KeyFilter:
    """Keys are only added; a table that is full is made anew from what there is then, a piece at a time: `piece` says
    of which keys `refill` wants all next, and None when none is being made.
    """

    def __init__(self) -> None:
        self._table = _Table(LEAST_BITS)
        self._next: _Table | None = None
        self._added = 0
        self._piece = 0
        self._piece_bits = 0

    def may_have(self, key: int) -> bool:
        """False only for keys that were never added, or are gone since the table was made."""
        slot = key >> (64 - self._table.bits)
        return bool(self._table.view[slot >> 3] >> (slot & 7) & 1)

    def add(self, keys: _U64, entries: int) -> None:
        """Keys, or their first bits, in ascending order, beside which the index keeps `entries`."""
        self._table.add(keys)
        self._added += len(keys)
        if self._next is not None:
            self._next.add(keys)
        elif self._added * FULL_SHARE > 1 << self._table.bits:
            self._next = _Table(max(LEAST_BITS, (entries * ROOM - 1).bit_length()))
            self._added, self._piece = entries, 0
            self._piece_bits = max(0, (entries // PIECE_KEYS).bit_length())

    def piece(self) -> tuple[int, int] | None:
        """The first and the last key of the range wanted."""
        if self._next is None:
            return None
        shift = 64 - self._piece_bits
        first = self._piece << shift
        return first, first + (1 << shift) - 1

    def refill(self, pieces: Iterable[_U64]) -> None:
        """All entries in the range wanted, each piece in ascending order."""
        assert self._next is not None
        for entries in pieces:
            self._next.add(entries)
        self._piece += 1
        if self._piece == 1 << self._piece_bits:
            self._table, self._next = self._next, None
