"""One host memory and what it keeps: evicted by (referenced or not, last access, deepest first), as pools do."""

from collections import OrderedDict

import numpy as np

from bench.lineage_plays import Indices

SLACK = 0.01
"""Eviction makes so much more room than is needed, for all policies alike."""


class Pool:
    """Blocks by number. `referenced`: what the policy in force says; `claimed`: what claims with all signals are.

    `mistaken`: blocks that went while only the policy took them for unreferenced, and have not come back since.
    """

    def __init__(self, numbers: int, capacity: int) -> None:
        self.capacity = capacity
        self.resident = np.zeros(numbers, dtype=bool)
        self.referenced = np.zeros(numbers, dtype=bool)
        self.claimed = np.zeros(numbers, dtype=bool)
        self.mistaken = np.zeros(numbers, dtype=bool)
        self.produced = np.zeros(numbers, dtype=bool)
        self.used_at = np.full(numbers, -np.inf)
        self.depth = np.zeros(numbers, dtype=np.int32)
        self.blocks = 0
        self.evicted = self.evicted_referenced = self.read_again = 0

    def read(self, blocks: Indices, now: float, lease_s: float) -> tuple[int, int]:
        """A prompt comes: (leading blocks that are here, leading blocks that were ever produced)."""
        hit, ideal = _leading(self.resident[blocks]), _leading(self.produced[blocks])
        missed = blocks[hit:ideal]
        self.read_again += int((self.mistaken[missed] & (now - self.used_at[missed] < lease_s)).sum())
        self.used_at[blocks] = now
        return hit, ideal

    def write(self, blocks: Indices, now: float) -> list[tuple[int, int]]:
        """An answer is complete: all blocks of its prompt are here; which stretches of them are new."""
        new = ~self.resident[blocks]
        edges = np.flatnonzero(np.diff(np.concatenate([[False], new, [False]])))
        self.depth[blocks] = np.arange(len(blocks))
        self.resident[blocks] = self.produced[blocks] = True
        self.mistaken[blocks] = False
        self.used_at[blocks] = now
        self.blocks += int(new.sum())
        return [(int(first), int(last)) for first, last in edges.reshape(-1, 2)]

    def evict(self) -> Indices:
        """What goes to make room; empty while there is enough."""
        if self.blocks <= self.capacity:
            return np.empty(0, dtype=np.int64)
        here = np.flatnonzero(self.resident)
        count = self.blocks - self.capacity + int(SLACK * self.capacity)
        order = self.used_at[here] + 1e9 * self.referenced[here] - 1e-6 * self.depth[here]
        gone = np.sort(here[np.argpartition(order, count)[:count]])
        self.resident[gone] = False
        self.mistaken[gone] = self.claimed[gone] & ~self.referenced[gone]
        self.evicted += count
        self.evicted_referenced += int(self.referenced[gone].sum())
        self.blocks -= count
        return gone


class Claims:
    """What claims with all signals are, block by block: `flags` of the blocks that active branches need."""

    def __init__(self, flags: np.ndarray, lease_s: float) -> None:
        self._flags, self._lease_s = flags, lease_s
        self._counts = np.zeros(len(flags), dtype=np.int32)
        self._active: OrderedDict[str, tuple[float, Indices]] = OrderedDict()

    def asked(self, branch: str, now: float) -> None:
        """Any request is a sign of life."""
        if branch in self._active:
            self._active[branch] = (now, self._active[branch][1])
            self._active.move_to_end(branch)

    def answered(self, branch: str, blocks: Indices, now: float, *, last: bool) -> None:
        """The branch needs exactly these blocks, or none after its last answer."""
        _, former = self._active.pop(branch, (now, blocks[:0]))
        if not last:
            self._active[branch] = (now, blocks)
            self._counts[blocks] += 1
            self._flags[blocks] = True
        self._release(former)

    def tick(self, now: float) -> None:
        """Branches silent for their lease need nothing."""
        while self._active and now - next(iter(self._active.values()))[0] >= self._lease_s:
            _, (_, blocks) = self._active.popitem(last=False)
            self._release(blocks)

    def _release(self, blocks: Indices) -> None:
        self._counts[blocks] -= 1
        self._flags[blocks] = self._counts[blocks] > 0


def _leading(flags: np.ndarray) -> int:
    return len(flags) if flags.all() else int(np.argmin(flags))
