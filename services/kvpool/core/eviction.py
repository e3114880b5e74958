"""Which block goes next: unreachable pieces, then unreferenced ones, then referenced ones; least recently used first.

A block goes only after every block here that extends it, and never while it is held. Equal times: deepest first.
A block counts as used at least as late as any block that extended it.

Candidates (committed leaves nobody holds) have an entry with their present key in a heap; entries whose key or block
has changed are dropped when they surface, so each operation takes amortised O(log n).
"""

import heapq
from array import array

REFERENCED, UNREACHABLE, READY = 1, 2, 4
"""Bits of `flags`: READY blocks are committed, all others are being written and cannot go."""
_RANK = tuple(0 if flags & UNREACHABLE else 2 if flags & REFERENCED else 1 for flags in range(8))
_SLACK = 1024

Key = tuple[int, float, int, int]


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
        self.held_blocks = 0
        self.referenced_blocks = 0
        self.unreachable_blocks = 0
        self._heap: list[Key] = []
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
        self._offer(parent)

    def _children(self, slot: int) -> list[int]:
        children: list[int] = []
        link = self.first_child[slot]
        while link:
            children.append(link - 1)
            link = self.next_sibling[link - 1]
        return children

    def touch(self, slot: int, now_s: float) -> None:
        """The block in `slot` was read or written."""
        if self.last_used_s[slot] < now_s:
            self.last_used_s[slot] = now_s
            self._offer(slot)

    def hold(self, slot: int) -> None:
        """One more reader needs `slot` to stay as it is."""
        if not self.holds[slot]:
            self.held_blocks += 1
        self.holds[slot] += 1

    def unhold(self, slot: int) -> None:
        """One reader of `slot` is done."""
        assert self.holds[slot], f"slot {slot} is not held"
        self.holds[slot] -= 1
        if not self.holds[slot]:
            self.held_blocks -= 1
            self._offer(slot)

    def mark(self, slot: int, *, referenced: bool, unreachable: bool) -> None:
        """What the directory says of the copy in `slot`."""
        old = self.flags[slot]
        new = (old & READY) | (REFERENCED if referenced else 0) | (UNREACHABLE if unreachable else 0)
        if new != old:
            self.referenced_blocks += (new & REFERENCED) - (old & REFERENCED)
            self.unreachable_blocks += bool(new & UNREACHABLE) - bool(old & UNREACHABLE)
            self.flags[slot] = new
            self._offer(slot)

    def pop(self) -> int | None:
        """The slot of the block that goes next, to be removed by the caller; None if none may go."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._is_current(entry):
                return entry[3]
        return None

    def is_candidate(self, slot: int) -> bool:
        """Whether the block in `slot` may go: committed, not held, extended by no block here."""
        return bool(self.flags[slot] & READY) and not self.holds[slot] and not self.first_child[slot]

    def key(self, slot: int) -> Key:
        """What the order compares; the smallest goes first."""
        return _RANK[self.flags[slot]], self.last_used_s[slot], -self.depth[slot], slot

    def _offer(self, slot: int) -> None:
        flags = self.flags[slot]
        if not flags & READY or self.first_child[slot] or self.holds[slot]:
            return
        heapq.heappush(self._heap, (_RANK[flags], self.last_used_s[slot], -self.depth[slot], slot))
        if len(self._heap) > self._heap_limit:
            self._heap = list({entry for entry in self._heap if self._is_current(entry)})
            heapq.heapify(self._heap)
            self._heap_limit = 2 * len(self._heap) + _SLACK

    def _is_current(self, entry: Key) -> bool:
        return self.is_candidate(entry[3]) and self.key(entry[3]) == entry

    def check(self) -> None:
        """Links go both ways, counts are right, and every candidate is in the heap under its present key."""
        entries = set(self._heap)
        for slot in range(len(self.flags)):
            for child in self._children(slot):
                assert self.present[slot], f"slot {slot} has children but no block"
                assert self.parent[child] == slot + 1, f"slot {child} is a child of {slot} and does not know it"
            if self.parent[slot]:
                assert slot in self._children(self.parent[slot] - 1), f"slot {slot} is no child of its parent"
            if self.is_candidate(slot):
                assert self.key(slot) in entries, f"slot {slot} may go but is not in the order"
            assert self.present[slot] or not self.flags[slot], f"slot {slot} has flags but no block"
        assert self.held_blocks == sum(1 for count in self.holds if count)
        assert self.referenced_blocks == sum(1 for flags in self.flags if flags & REFERENCED)
        assert self.unreachable_blocks == sum(1 for flags in self.flags if flags & UNREACHABLE)
