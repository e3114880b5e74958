"""Everything a node holds as of one sequence number, given out in parts, parents before what extends them."""

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from schemas.kv import ChangeType, LocationChange, SnapshotPart, Tier
from services.kvpool.core.eviction import READY
from services.kvpool.core.locations import CHANGE_BYTES, bytes_per_block, change_of


@dataclass(frozen=True)
class FrozenTree:
    """Copies of the tables of a pool's blocks, by slot; links hold slot + 1, `parents` the key before a block or 0."""

    keys: "array[int]"
    parents: "array[int]"
    parent: "array[int]"
    first_child: "array[int]"
    next_sibling: "array[int]"
    flags: bytes

    def runs(self) -> Iterator[tuple[int | None, list[int]]]:
        """Committed blocks as chains (key before the first, keys), each after the chain it continues."""
        used = (np.frombuffer(self.flags, np.uint8) & READY != 0) | (np.frombuffer(self.first_child, np.uint32) != 0)
        roots = np.flatnonzero(used & (np.frombuffer(self.parent, np.uint32) == 0))
        for root in roots.tolist():
            stack = [root]
            while stack:
                yield from self._chain(stack.pop(), stack)

    def _chain(self, slot: int, stack: list[int]) -> Iterator[tuple[int | None, list[int]]]:
        """Follow first children from `slot`; other children go on the stack. Uncommitted blocks cut the chain."""
        keys: list[int] = []
        before: int | None = None
        while True:
            if self.flags[slot] & READY:
                if not keys:
                    before = self.parents[slot] or None
                keys.append(self.keys[slot])
            elif keys:
                yield before, keys
                keys = []
            link = self.first_child[slot]
            if not link:
                break
            slot = link - 1
            sibling = self.next_sibling[slot]
            while sibling:
                stack.append(sibling - 1)
                sibling = self.next_sibling[sibling - 1]
        if keys:
            yield before, keys


class Snapshot:
    """One snapshot in the giving: part 0, 1, 2, ... in order, each again if its answer was lost."""

    def __init__(
        self,
        id_: str,
        node: str,
        incarnation: int,
        seq: int,
        l1: dict[int, int | None],
        tree: FrozenTree,
        media: Mapping[int, bytes],
    ) -> None:
        self.id, self.seq = id_, seq
        self._node, self._incarnation = node, incarnation
        self._changes = self._all(l1, tree)
        self._media = media
        self._rest: tuple[Tier, int | None, list[int]] | None = None
        self._last: SnapshotPart | None = None
        self._cursor = 0

    @staticmethod
    def _all(l1: dict[int, int | None], tree: FrozenTree) -> Iterator[tuple[Tier, int | None, list[int]]]:
        for before, keys in tree.runs():
            yield Tier.L2, before, keys
        run: list[int] = []
        first: int | None = None
        for key, parent in l1.items():
            if run and parent != run[-1]:
                yield Tier.L1, first, run
                run = []
            if not run:
                first = parent
            run.append(key)
        if run:
            yield Tier.L1, first, run

    def part(self, cursor: int, limit_blocks: int, limit_bytes: int) -> SnapshotPart | None:
        """Part `cursor`, of at most `limit_blocks` and `limit_bytes`; None if it is neither the next nor the last."""
        if self._last is not None and cursor == self._cursor - 1:
            return self._last
        if cursor != self._cursor or (self._last is not None and self._last.next_cursor is None):
            return None
        changes, ended = self._collect(limit_blocks, limit_bytes)
        self._cursor += 1
        self._last = SnapshotPart(
            node=self._node,
            incarnation=self._incarnation,
            seq=self.seq,
            snapshot=self.id,
            changes=changes,
            next_cursor=None if ended else self._cursor,
        )
        return self._last

    def _collect(self, limit_blocks: int, limit_bytes: int) -> tuple[list[LocationChange], bool]:
        changes: list[LocationChange] = []
        blocks, size, each = 0, 4 * CHANGE_BYTES, bytes_per_block(self._media)
        while True:
            run = self._rest or next(self._changes, None)
            self._rest = None
            if run is None:
                return changes, True
            tier, before, keys = run
            room = min(limit_blocks - blocks, (limit_bytes - size - CHANGE_BYTES) // each)
            if room < 1:
                self._rest = run
                return changes, False
            changes.append(change_of(ChangeType.STORED, tier, before, keys[:room], self._media))
            blocks += min(room, len(keys))
            size += CHANGE_BYTES + each * min(room, len(keys))
            if len(keys) > room:
                self._rest = (tier, keys[room - 1], keys[room:])
