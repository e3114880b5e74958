"""Which block goes next: unreachable pieces, then unreferenced ones, then referenced ones; among equals those of least
value, then the least recently used.

A block goes only after every block here that extends it, and never while it is held. Equal times: deepest first.
A block counts as used at least as late as any block that extended it. Values are what the directory says of the copy,
one for the time it is referenced and one for the time it is not; where it says nothing, count and time alone decide.

Candidates (committed leaves nobody holds) have an entry with their present key in a heap; entries whose key or block
has changed are dropped when they surface, so each operation takes amortised O(log n). The block that the last removal
laid bare waits beside the heap: chains mostly go from end to start.
"""

import heapq
from array import array

import numpy as np
import numpy.typing as npt

from schemas.kv import NEUTRAL

REFERENCED, UNREACHABLE, READY = 1, 2, 4
"""Bits of `flags`: READY blocks are committed, all others are being written and cannot go."""
_RANK = tuple(0 if flags & UNREACHABLE else 2 if flags & REFERENCED else 1 for flags in range(8))
_SLACK = 1024
_FEW = 16
"""Up to so many slots are gone through one by one: an array operation costs more than that."""

Key = tuple[int, int, float, int, int]
_Slots = npt.NDArray[np.intp]


class EvictionOrder:
    """The tree of the blocks of one pool and the order in which they go. Links hold slot + 1; 0 is no link."""

    def __init__(self, slots: int) -> None:
        self.parent = array("I", bytes(4 * slots))
        self.first_child = array("I", bytes(4 * slots))
        self.next_sibling = array("I", bytes(4 * slots))
        self._previous_sibling = array("I", bytes(4 * slots))
        self.depth = array("I", bytes(4 * slots))
        self.last_used_s = array("d", bytes(8 * slots))
        self.holds = array("I", bytes(4 * slots))
        self.flags = bytearray(slots)
        self.present = bytearray(slots)
        self.keep = bytearray([NEUTRAL]) * slots
        """Value of a copy while it is referenced."""
        self.rest = bytearray([NEUTRAL]) * slots
        """Value of a copy while it is not."""
        self._holds = np.frombuffer(self.holds, np.uint32)
        self._times = np.frombuffer(self.last_used_s, np.float64)
        self._bits = np.frombuffer(self.flags, np.uint8)
        self._children_of = np.frombuffer(self.first_child, np.uint32)
        self.held_blocks = 0
        self.referenced_blocks = 0
        self.unreachable_blocks = 0
        self._heap: list[Key] = []
        self._bared: int | None = None
        self._heap_limit = _SLACK

    def add(self, slot: int, parent: int | None, depth: int, now_s: float) -> None:
        """A block is being written to `slot`; `parent` is the slot of the block it extends, if that is here."""
        self.present[slot] = 1
        self.depth[slot] = depth
        self.last_used_s[slot] = now_s
        if parent is not None:
            self.attach(slot, parent)

    def attach(self, slot: int, parent: int) -> None:
        """The block that `slot` extends is in slot `parent`."""
        head = self.first_child[parent]
        self.parent[slot] = parent + 1
        self.next_sibling[slot] = head
        if head:
            self._previous_sibling[head - 1] = slot + 1
        self.first_child[parent] = slot + 1

    def ready(self, slot: int, now_s: float) -> None:
        """The block in `slot` is committed."""
        self.flags[slot] |= READY
        self.last_used_s[slot] = now_s
        self._offer(slot)

    def remove(self, slot: int) -> list[int]:
        """The block in `slot` is gone. Returns the slots of the blocks that extended it: they have no parent now."""
        children: list[int] = []
        if self.first_child[slot]:
            children = self._children(slot)
            for child in children:
                self.parent[child] = self.next_sibling[child] = self._previous_sibling[child] = 0
            self.first_child[slot] = 0
        flags = self.flags[slot]
        self.referenced_blocks -= flags & REFERENCED
        self.unreachable_blocks -= (flags & UNREACHABLE) // UNREACHABLE
        self.present[slot] = self.flags[slot] = 0
        self.keep[slot] = self.rest[slot] = NEUTRAL
        parent = self.parent[slot]
        if parent:
            self._detach(slot, parent - 1)
        return children

    def _detach(self, slot: int, parent: int) -> None:
        before, after = self._previous_sibling[slot], self.next_sibling[slot]
        if before:
            self.next_sibling[before - 1] = after
        else:
            self.first_child[parent] = after
        if after:
            self._previous_sibling[after - 1] = before
        self.parent[slot] = self.next_sibling[slot] = self._previous_sibling[slot] = 0
        if self.last_used_s[parent] < self.last_used_s[slot]:
            self.last_used_s[parent] = self.last_used_s[slot]
        if not self.first_child[parent]:
            bared, self._bared = self._bared, parent
            if bared is not None:
                self._offer(bared)

    def _children(self, slot: int) -> list[int]:
        children: list[int] = []
        link = self.first_child[slot]
        while link:
            children.append(link - 1)
            link = self.next_sibling[link - 1]
        return children

    def touch(self, slots: list[int], now_s: float) -> None:
        """The blocks in these slots were read or written."""
        if len(slots) <= _FEW:
            for slot in slots:
                if self.last_used_s[slot] < now_s:
                    self.last_used_s[slot] = now_s
                    self._offer(slot)
            return
        at = np.array(slots, np.intp)
        at = at[self._times[at] < now_s]
        self._times[at] = now_s
        self._offer_leaves(at)

    def hold(self, slots: list[int]) -> None:
        """One more reader needs each of these slots to stay as it is."""
        if len(slots) <= _FEW:
            for slot in slots:
                self.held_blocks += not self.holds[slot]
                self.holds[slot] += 1
            return
        at = np.array(slots, np.intp)
        self.held_blocks += len(np.unique(at[self._holds[at] == 0]))
        np.add.at(self._holds, at, 1)

    def unhold(self, slots: list[int]) -> list[int]:
        """One reader of each of these slots is done; returns those that nobody holds now, in ascending order."""
        if len(slots) <= _FEW:
            return self._unhold_few(slots)
        at = np.array(slots, np.intp)
        assert self._holds[at].all(), "a slot is not held"
        np.subtract.at(self._holds, at, 1)
        loose = np.unique(at[self._holds[at] == 0])
        self.held_blocks -= len(loose)
        self._offer_leaves(loose)
        found: list[int] = loose.tolist()
        return found

    def _unhold_few(self, slots: list[int]) -> list[int]:
        loose: list[int] = []
        for slot in slots:
            assert self.holds[slot], "a slot is not held"
            self.holds[slot] -= 1
            if not self.holds[slot]:
                loose.append(slot)
                self._offer(slot)
        self.held_blocks -= len(loose)
        return sorted(loose)

    def mark(self, slots: list[int], bits: int) -> None:
        """What the directory says of the copies in these slots: REFERENCED, UNREACHABLE, both or neither.

        A value said for the time when a copy was (or was not) referenced is void when that ends.
        """
        void = self.rest if bits & REFERENCED else self.keep
        if len(slots) <= _FEW:
            for slot in slots:
                self._mark(slot, bits, void)
            return
        at = np.array(slots, np.intp)
        old = self._bits[at]
        differs = (old & (REFERENCED | UNREACHABLE)) != bits
        if not differs.any():
            return
        at, old = at[differs], old[differs]
        self._bits[at] = (old & READY) | bits
        was, lost = int(np.count_nonzero(old & REFERENCED)), int(np.count_nonzero(old & UNREACHABLE))
        self.referenced_blocks += (len(at) if bits & REFERENCED else 0) - was
        self.unreachable_blocks += (len(at) if bits & UNREACHABLE else 0) - lost
        np.frombuffer(void, np.uint8)[at] = NEUTRAL
        self._offer_leaves(at)

    def _mark(self, slot: int, bits: int, void: bytearray) -> None:
        old = self.flags[slot]
        if old & ~READY == bits:
            return
        self.flags[slot] = old & READY | bits
        self.referenced_blocks += (bits & REFERENCED) - (old & REFERENCED)
        self.unreachable_blocks += ((bits & UNREACHABLE) - (old & UNREACHABLE)) // UNREACHABLE
        void[slot] = NEUTRAL
        self._offer(slot)

    def value(self, slots: list[int], value: int, *, referenced: bool) -> None:
        """What the copies in these slots are worth while they are referenced, or while they are not."""
        said = self.keep if referenced else self.rest
        if len(slots) <= _FEW:
            for slot in slots:
                if said[slot] != value:
                    said[slot] = value
                    if bool(self.flags[slot] & REFERENCED) == referenced:
                        self._offer(slot)
            return
        at = np.array(slots, np.intp)
        values = np.frombuffer(said, np.uint8)
        at = at[values[at] != value]
        values[at] = value
        concerned = at[(self._bits[at] & REFERENCED != 0) == referenced]
        self._offer_leaves(concerned)

    def forget_values(self) -> None:
        """Nothing is known of any copy's value."""
        self.keep[:] = self.rest[:] = bytes([NEUTRAL]) * len(self.keep)
        self._heap = [self.key(slot) for slot in self._leaves(np.arange(len(self.flags)))]
        heapq.heapify(self._heap)

    def pop(self) -> int | None:
        """The slot of the block that goes next, to be removed by the caller; None if none may go."""
        bared, self._bared = self._bared, None
        if bared is not None and self.is_candidate(bared):
            if not self._heap or self.key(bared) < self._heap[0]:
                return bared
            self._push(bared)
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._is_current(entry):
                return entry[-1]
        return None

    def is_candidate(self, slot: int) -> bool:
        """Whether the block in `slot` may go: committed, not held, extended by no block here."""
        return bool(self.flags[slot] & READY) and not self.holds[slot] and not self.first_child[slot]

    def key(self, slot: int) -> Key:
        """What the order compares; the smallest goes first."""
        rank = _RANK[self.flags[slot]]
        value = self.keep[slot] if rank == 2 else self.rest[slot] if rank else 0
        return rank, value, self.last_used_s[slot], -self.depth[slot], slot

    def _leaves(self, at: _Slots) -> list[int]:
        """Those of these slots whose block may go."""
        free = (self._bits[at] & READY != 0) & (self._children_of[at] == 0) & (self._holds[at] == 0)
        found: list[int] = at[free].tolist()
        return found

    def _offer_leaves(self, at: _Slots) -> None:
        for slot in self._leaves(at):
            self._push(slot)

    def _offer(self, slot: int) -> None:
        if self.flags[slot] & READY and not self.first_child[slot] and not self.holds[slot]:
            self._push(slot)

    def _push(self, slot: int) -> None:
        heapq.heappush(self._heap, self.key(slot))
        if len(self._heap) > self._heap_limit:
            self._heap = list({entry for entry in self._heap if self._is_current(entry)})
            heapq.heapify(self._heap)
            self._heap_limit = 2 * len(self._heap) + _SLACK

    def _is_current(self, entry: Key) -> bool:
        return self.is_candidate(entry[-1]) and self.key(entry[-1]) == entry

    def check(self) -> None:
        """Links go both ways, counts are right, and every candidate is in the heap under its present key."""
        entries = set(self._heap)
        for slot in range(len(self.flags)):
            for child in self._children(slot):
                assert self.present[slot], f"slot {slot} has children but no block"
                assert self.parent[child] == slot + 1, f"slot {child} is a child of {slot} and does not know it"
            if self.parent[slot]:
                assert slot in self._children(self.parent[slot] - 1), f"slot {slot} is no child of its parent"
            if self.is_candidate(slot) and slot != self._bared:
                assert self.key(slot) in entries, f"slot {slot} may go but is not in the order"
            assert self.present[slot] or not self.flags[slot], f"slot {slot} has flags but no block"
        assert self.held_blocks == sum(1 for count in self.holds if count)
        assert self.referenced_blocks == sum(1 for flags in self.flags if flags & REFERENCED)
        assert self.unreachable_blocks == sum(1 for flags in self.flags if flags & UNREACHABLE)
