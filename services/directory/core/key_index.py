"""Which run holds a key: sorted arrays of 12 bytes a key, a few levels deep so that no change moves much."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from services.directory.core.run import Keys, Run

SHARD_BITS = 5
NEWEST_KEYS = 4096
SMALL_LEVELS = 16
LARGE_LEVELS = 4

_U64 = npt.NDArray[np.uint64]
_U32 = npt.NDArray[np.uint32]


class _Level:
    """Keys in ascending order, each with the ident of its run; 0 says that the key was deleted."""

    __slots__ = ("idents", "keys", "view")

    def __init__(self, keys: _U64, idents: _U32) -> None:
        self.keys, self.idents, self.view = keys, idents, keys.data

    def find(self, key: int) -> int | None:
        """The ident of `key`; None when this level says nothing of it."""
        at = bisect_left(self.view, key)
        return int(self.idents[at]) if at < len(self.view) and self.view[at] == key else None


def _sorted(keys: _U64, idents: _U32) -> _Level:
    """A level out of entries from oldest to newest: of each key the last one."""
    order = np.argsort(keys, kind="stable")
    keys, idents = keys[order], idents[order]
    last = np.ones(len(keys), bool)
    last[:-1] = keys[1:] != keys[:-1]
    return _Level(keys[last], idents[last])


def _joined(levels: list[_Level]) -> _Level:
    """One level out of several, oldest first."""
    return _sorted(np.concatenate([level.keys for level in levels]), np.concatenate([level.idents for level in levels]))


def _merged(old: _Level, new: _Level) -> _Level:
    """Both levels in one, without what is deleted; cheaper than sorting when `new` is much the smaller one."""
    at = np.searchsorted(old.keys, new.keys)
    inside = np.flatnonzero(at < len(old.keys))
    known = np.zeros(len(at), bool)
    known[inside] = old.keys[at[inside]] == new.keys[inside]
    old.idents[at[known]] = new.idents[known]
    places = at[~known] + np.arange(len(at) - np.count_nonzero(known))
    taken = np.ones(len(old.keys) + len(places), bool)
    taken[places] = False
    keys, idents = np.empty(len(taken), np.uint64), np.empty(len(taken), np.uint32)
    keys[places], idents[places] = new.keys[~known], new.idents[~known]
    keys[taken], idents[taken] = old.keys, old.idents
    return _Level(keys, idents) if idents.all() else _Level(keys[idents != 0], idents[idents != 0])


class KeyIndex:
    """New entries gather unsorted; a full lot of them becomes a small level, many small ones a large one, and many
    large ones are merged into the shards, one with every further lot. So a change pays for a lot at most, and a key
    costs 12 bytes in the end. The newest level that names a key is right."""

    def __init__(self, runs: list[Run | None]) -> None:
        self._runs = runs
        self._keys = np.empty(NEWEST_KEYS, np.uint64)
        self._idents = np.empty(NEWEST_KEYS, np.uint32)
        self._count = 0
        self._small: list[_Level] = []
        self._large: list[_Level] = []
        self._frozen: list[_Level] = []
        self._shards = [_Level(np.empty(0, np.uint64), np.empty(0, np.uint32)) for _ in range(1 << SHARD_BITS)]
        self._next = 0

    def find(self, key: int) -> Run | None:
        """The run that holds `key`, or None."""
        hits = np.flatnonzero(self._keys[: self._count] == np.uint64(key))
        if len(hits):
            return self._runs[int(self._idents[hits[-1]])]
        for levels in (self._small, self._large, self._frozen):
            for level in reversed(levels):
                ident = level.find(key)
                if ident is not None:
                    return self._runs[ident]
        ident = self._shards[key >> (64 - SHARD_BITS)].find(key)
        return None if ident is None else self._runs[ident]

    def put(self, keys: Keys, run: Run | None) -> None:
        """These keys are in `run` from now on (None: nowhere)."""
        entries = np.frombuffer(keys, np.uint64)
        while len(entries):
            taken = entries[: NEWEST_KEYS - self._count]
            end = self._count + len(taken)
            self._keys[self._count : end] = taken
            self._idents[self._count : end] = run.ident if run is not None else 0
            self._count = end
            if end == NEWEST_KEYS:
                self._next_lot()
            entries = entries[len(taken) :]

    def _next_lot(self) -> None:
        self._small.append(_sorted(self._keys, self._idents))
        self._count = 0
        if self._frozen:
            self._merge_shard()
        if len(self._small) == SMALL_LEVELS:
            self._large.append(_joined(self._small))
            self._small = []
        if len(self._large) == LARGE_LEVELS and not self._frozen:
            self._frozen, self._large = self._large, []

    def _merge_shard(self) -> None:
        """Merge the part of the frozen levels that belongs to the next shard."""
        number, self._next = self._next, self._next + 1
        edges = [number << (64 - SHARD_BITS), (number + 1 << (64 - SHARD_BITS)) - 1]
        parts = []
        for level in self._frozen:
            first = bisect_left(level.view, edges[0])
            last = int(np.searchsorted(level.keys, np.uint64(edges[1]), side="right"))
            parts.append(_Level(level.keys[first:last], level.idents[first:last]))
        self._shards[number] = _merged(self._shards[number], _joined(parts))
        if self._next == len(self._shards):
            self._frozen, self._next = [], 0

    def check(self) -> None:
        """Assert that levels are in order, and that shards keep to their range and to what is not deleted."""
        levels = [*self._small, *self._large, *self._frozen, *self._shards]
        assert all(a < b for level in levels for a, b in pairwise(level.keys.tolist()))
        for number, shard in enumerate(self._shards):
            assert all(key >> (64 - SHARD_BITS) == number for key in shard.keys.tolist())
            assert shard.idents.all()
