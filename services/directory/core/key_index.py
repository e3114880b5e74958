"""Which run holds a key: 12 bytes a key in sorted shards, and a dictionary of the newest changes before them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import pairwise, repeat

import numpy as np
import numpy.typing as npt

from services.directory.core.run import Run

SHARD_BITS = 8
SMALLEST_BATCH = 16_384


class _Shard:
    """Keys of one range in ascending order, and the ident of the run of each."""

    __slots__ = ("idents", "keys", "view")

    def __init__(self) -> None:
        self.put(np.empty(0, np.uint64), np.empty(0, np.uint32))

    def put(self, keys: npt.NDArray[np.uint64], idents: npt.NDArray[np.uint32]) -> None:
        self.keys, self.idents, self.view = keys, idents, keys.data

    def merge(self, keys: npt.NDArray[np.uint64], idents: npt.NDArray[np.uint32]) -> None:
        """Take in sorted changes; ident 0 deletes."""
        at = np.searchsorted(self.keys, keys)
        known = np.zeros(len(keys), bool)
        inside = at < len(self.keys)
        known[inside] = self.keys[at[inside]] == keys[inside]
        self.idents[at[known]] = idents[known]
        new = ~known & (idents != 0)
        merged = np.insert(self.keys, at[new], keys[new])
        owners = np.insert(self.idents, at[new], idents[new])
        if not owners.all():
            merged, owners = merged[owners != 0], owners[owners != 0]
        self.put(merged, owners)


class KeyIndex:
    """A map from key to run whose changes cost a dictionary entry each at first, and 12 bytes after a merge.

    Changes gather in `_recent`; a full one is frozen and merged shard by shard, a few with every later change, so that
    no single change pays for more than a few shards. The newest layer wins; None in a layer means deleted.
    """

    def __init__(self, runs: list[Run | None]) -> None:
        self._runs = runs
        self._recent: dict[int, Run | None] = {}
        self._frozen: dict[int, Run | None] = {}
        self._shards = [_Shard() for _ in range(1 << SHARD_BITS)]
        self._merged = 0
        self._stored = 0
        self._keys = np.empty(0, np.uint64)
        self._idents = np.empty(0, np.uint32)
        self._bounds: list[int] = []

    def find(self, key: int) -> Run | None:
        """The run that holds `key`, or None."""
        for layer in (self._recent, self._frozen):
            if key in layer:
                return layer[key]
        shard = self._shards[key >> (64 - SHARD_BITS)]
        at = bisect_left(shard.view, key)
        if at < len(shard.view) and shard.view[at] == key:
            return self._runs[int(shard.idents[at])]
        return None

    def put(self, keys: Iterable[int], run: Run | None) -> None:
        """These keys are in `run` from now on (None: nowhere)."""
        before = len(self._recent)
        self._recent.update(zip(keys, repeat(run)))
        limit = max(SMALLEST_BATCH, self._stored // 32)
        if self._frozen:
            self._merge(1 + (len(self._recent) - before << SHARD_BITS + 1) // limit)
        if len(self._recent) >= limit:
            self._merge(len(self._shards))
            self._freeze()

    def _freeze(self) -> None:
        self._frozen, self._recent = self._recent, {}
        keys = np.fromiter(self._frozen, np.uint64, len(self._frozen))
        idents = np.fromiter((run.ident if run else 0 for run in self._frozen.values()), np.uint32, len(self._frozen))
        order = np.argsort(keys)
        self._keys, self._idents = keys[order], idents[order]
        edges = np.arange(1, len(self._shards), dtype=np.uint64) << np.uint64(64 - SHARD_BITS)
        self._bounds = [0, *np.searchsorted(self._keys, edges).tolist(), len(keys)]
        self._merged = 0

    def _merge(self, shards: int) -> None:
        if not self._frozen:
            return
        for number in range(self._merged, min(self._merged + shards, len(self._shards))):
            first, last = self._bounds[number], self._bounds[number + 1]
            if first < last:
                shard = self._shards[number]
                self._stored -= len(shard.keys)
                shard.merge(self._keys[first:last], self._idents[first:last])
                self._stored += len(shard.keys)
        self._merged = min(self._merged + shards, len(self._shards))
        if self._merged == len(self._shards):
            self._frozen = {}
            self._keys, self._idents = np.empty(0, np.uint64), np.empty(0, np.uint32)

    def check(self) -> None:
        """Assert that shards are sorted, lie in their range and name living runs unless a newer layer says more."""
        for number, shard in enumerate(self._shards):
            keys = shard.keys.tolist()
            assert all(a < b for a, b in pairwise(keys)), f"shard {number} is not sorted"
            assert all(key >> (64 - SHARD_BITS) == number for key in keys), f"shard {number} holds foreign keys"
            for key in keys:
                run = self.find(key)
                assert run is None or run.index_of(key) is not None, f"key {key} is not in run {run.ident}"
