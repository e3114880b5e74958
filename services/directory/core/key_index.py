"""Which run holds a key: sorted arrays of 8 bytes a key, merged by and by so that no change moves much."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from services.directory.core.key_filter import KeyFilter

IDENT_BITS = 27
LOT_KEYS = 4096
LOTS = 8
MERGED_AT_ONCE = 16
PART_ENTRIES = 1 << 15
_TAG = ((1 << 64) - 1) >> (IDENT_BITS + 1) << (IDENT_BITS + 1)
_IDENT = (1 << IDENT_BITS) - 1

_U64 = npt.NDArray[np.uint64]


class _Level:
    """Entries in ascending order, in parts: part i of 2**b has those whose first b bits are i. `taken` of them say that
    a key was taken back."""

    __slots__ = ("bits", "parts", "taken", "total", "views")

    def __init__(self, parts: list[_U64], taken: int) -> None:
        self.bits = len(parts).bit_length() - 1
        self.parts = parts
        self.views = [part.data for part in parts]
        self.total = sum(map(len, parts))
        self.taken = taken

    def find(self, tag: int) -> Iterator[int]:
        view = self.views[tag >> (64 - self.bits) if self.bits else 0]
        for at in range(bisect_left(view, tag), len(view)):
            entry = view[at]
            if entry & _TAG != tag:
                return
            if not entry & 1:
                yield entry >> 1 & _IDENT

    def between(self, first: int, last: int) -> list[_U64]:
        """The entries in [first, last], where no part begins or ends inside."""
        shift = 64 - self.bits
        low, high = (first >> shift, last >> shift) if self.bits else (0, 0)
        if high > low:
            return self.parts[low : high + 1]
        part = self.parts[low]
        ends = np.searchsorted(part, np.array([first, last], np.uint64))
        return [part[int(ends[0]) : int(ends[1])]]


class _Merge:
    """Several levels becoming one, a part a step; the levels stay in use until the last one."""

    def __init__(self, sources: list[_Level]) -> None:
        self.sources = sources
        self._takes = any(level.taken for level in sources)
        total = sum(level.total for level in sources)
        self._bits = max(max(0, (total - 1).bit_length() - PART_ENTRIES.bit_length() + 1), 0)
        self._parts: list[_U64] = []
        self._taken = 0

    def step(self) -> _Level | None:
        shift = 64 - self._bits
        first = len(self._parts) << shift
        last = first + (1 << shift) - 1
        part = _merged([part for level in self.sources for part in level.between(first, last)], self._takes)
        self._parts.append(part)
        self._taken += _taken(part) if self._takes else 0
        return _Level(self._parts, self._taken) if len(self._parts) == 1 << self._bits else None


def _taken(entries: _U64) -> int:
    return int(np.count_nonzero(entries & np.uint64(1)))


def _merged(pieces: list[_U64], takes: bool) -> _U64:
    """Entries of all pieces in order; with `takes` one that was put and one that took it back cancel each other."""
    entries = np.concatenate(pieces)
    entries.sort()
    if not takes:
        return entries
    taken = (entries & np.uint64(1)).astype(np.int64)
    bare = entries >> np.uint64(1)
    fresh = np.ones(len(bare), bool)
    fresh[1:] = bare[1:] != bare[:-1]
    first = np.flatnonzero(fresh)
    net = np.add.reduceat(1 - 2 * taken, first)
    left = bare[first] << np.uint64(1) | (net < 0).astype(np.uint64)
    return np.repeat(left, np.abs(net))


class KeyIndex:
    """An entry is the first bits of a key, the ident of its run, and whether it was put or taken back; who looks for a
    key asks the runs named. New keys gather as they come; full lots of them are sorted, and levels of like size are
    merged, one part with every further lot. So a change pays for a lot and a few parts at most, and a key costs 8 bytes
    in the end, and a byte or two in the filter that knows most new keys as such.
    """

    def __init__(self) -> None:
        self._keys = array("Q")
        self._marks: list[tuple[int, int]] = []
        self._gathered = np.zeros(1 << 16, np.uint8)
        self._gathered_view = self._gathered.data
        self._filter = KeyFilter()
        self._lots: list[_Level] = []
        self._tiers: list[list[_Level]] = [[]]
        self._merges: dict[int, _Merge] = {}

    def put(self, packed: bytes, ident: int) -> None:
        """These packed keys are in run `ident` from now on."""
        self._mark(packed, ident << 1)

    def take(self, packed: bytes, ident: int) -> None:
        """These keys, put before, are no longer in run `ident`."""
        self._mark(packed, ident << 1 | 1)

    def may_have(self, key: int) -> bool:
        """False only if no run has `key`: for most new keys, and at once."""
        return self._gathered_view[key & 0xFFFF] != 0 or self._filter.may_have(key)

    def find(self, key: int) -> Iterator[int]:
        """Idents of the runs that may hold `key`; the one that does is among them."""
        tag = key & _TAG
        if self._keys:
            hits = np.flatnonzero(np.frombuffer(self._keys, np.uint64) == np.uint64(key))
            if len(hits):
                ends = np.cumsum([count for _, count in self._marks])
                yield from (self._marks[int(mark)][0] >> 1 for mark in np.searchsorted(ends, hits[::-1], side="right"))
        for lot in reversed(self._lots):
            yield from lot.find(tag)
        for tier, levels in enumerate(self._tiers):
            for level in levels:
                yield from level.find(tag)
            if tier in self._merges:
                for level in self._merges[tier].sources:
                    yield from level.find(tag)

    def _mark(self, packed: bytes, mark: int) -> None:
        self._keys.frombytes(packed)
        self._gathered.put(np.frombuffer(packed, np.uint16)[::4], 1)
        self._marks.append((mark, len(packed) >> 3))
        if len(self._keys) >= LOT_KEYS:
            self._next_lot()

    def _next_lot(self) -> None:
        marks, counts = zip(*self._marks, strict=True)
        lot = np.frombuffer(self._keys, np.uint64) & np.uint64(_TAG)
        lot |= np.repeat(np.array(marks, np.uint64), counts)
        lot.sort()
        self._lots.append(_Level([lot], _taken(lot) if any(mark & 1 for mark in marks) else 0))
        self._keys, self._marks = array("Q"), []
        self._gathered.fill(0)
        self._filter.add(lot, self.entries())
        if piece := self._filter.piece():
            self._filter.refill(entries for level in self._levels() for entries in level.between(*piece))
        if len(self._lots) >= LOTS:
            takes = any(lot.taken for lot in self._lots)
            entries = _merged([lot.parts[0] for lot in self._lots], takes)
            self._store(_Level([entries], _taken(entries) if takes else 0))
            self._lots = []
        for tier, merge in list(self._merges.items()):
            level = merge.step()
            if level is not None:
                del self._merges[tier]
                self._store(level)

    def _store(self, level: _Level) -> None:
        """Put a level with those of its size; many of them, or few in which much was taken back, are merged."""
        tier, most = 0, LOTS * LOT_KEYS
        while level.total > 2 * most:
            tier, most = tier + 1, most * MERGED_AT_ONCE
        while len(self._tiers) <= tier:
            self._tiers.append([])
        levels = self._tiers[tier]
        if level.total:
            levels.append(level)
        total, taken = sum(level.total for level in levels), sum(level.taken for level in levels)
        wanted = len(levels) >= MERGED_AT_ONCE or (len(levels) > 1 and 4 * taken > total)
        if wanted and tier not in self._merges:
            self._merges[tier] = _Merge(levels)
            self._tiers[tier] = []

    def entries(self) -> int:
        """Entries kept, those that cancel each other included."""
        return len(self._keys) + sum(level.total for level in self._levels())

    def _levels(self) -> Iterator[_Level]:
        yield from self._lots
        for levels in self._tiers:
            yield from levels
        for merge in self._merges.values():
            yield from merge.sources

    def check(self) -> None:
        """Assert that levels are in order and every part keeps to its range."""
        for level in self._levels():
            for number, part in enumerate(level.parts):
                entries = part.tolist()
                assert all(a <= b for a, b in pairwise(entries))
                assert not level.bits or all(entry >> (64 - level.bits) == number for entry in entries)
            assert level.taken == sum(_taken(part) for part in level.parts)
        assert sum(count for _, count in self._marks) == len(self._keys)
