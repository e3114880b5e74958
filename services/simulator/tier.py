"""One memory tier of one node: pieces of contexts in the pool's own eviction order, token by token accounted.

A piece is a run of at most `PIECE_BLOCKS` blocks with consecutive keys that was written at once; it goes as a whole.
`EvictionOrder` sees pieces as its slots, so the order is the product's, in larger steps.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

from services.kvpool.core.eviction import REFERENCED, UNREACHABLE, EvictionOrder

PIECE_BLOCKS = 128
MEAN_BLOCKS = 6
"""There are slots for pieces of this size on average; with smaller ones a tier is full before its capacity."""
_SAID = REFERENCED | UNREACHABLE
_SPREAD = PIECE_BLOCKS.bit_length() - 1
_NOTHING: list[int] = []
KeyRun = tuple[int, int]
"""The first of some consecutive keys, and how many they are."""


class Gone(NamedTuple):
    """A piece that was evicted: the key before it (None at the start of a context) and its keys."""

    parent: int | None
    first: int
    blocks: int


class Tier:
    """`capacity_blocks` of KV; room for writing is made by evicting what nobody holds. `evicted` is told of each."""

    def __init__(self, capacity_blocks: int, evicted: Callable[[Gone], None] | None = None) -> None:
        self.capacity_blocks = capacity_blocks
        self.used_blocks = 0
        self.referenced_blocks = 0
        self._evicted = evicted
        self._slots = max(1024, capacity_blocks // MEAN_BLOCKS)
        self._order = EvictionOrder(self._slots)
        self._free = list(range(self._slots - 1, -1, -1))
        self._first: list[int] = [0] * self._slots
        self._end: list[int] = [0] * self._slots
        self._parent_key: list[int | None] = [None] * self._slots
        self._referenced: list[int] = [0] * self._slots
        self._unreachable: list[int] = [0] * self._slots
        self._top: list[int] = [0] * self._slots
        self._at: dict[int, list[int]] = {}
        self._orphans: dict[int, list[int]] = {}

    # reading

    def reach(self, keys: "array[int]", first: int, last: int) -> int:
        """How far blocks [first, last) of a context are here without a gap: the end of the run from `first` on.

        Pieces go suffix first: a block whose piece joins `first` is here with all between.
        """
        if first >= last or not self._joins(keys[first], first):
            return min(first, last)
        if self._joins(keys[last - 1], first):
            return last
        low, high = first + 1, last - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self._joins(keys[middle - 1], first):
                low = middle
            else:
                high = middle - 1
        return low

    def _joins(self, key: int, first: int) -> bool:
        """Whether the block is here, and all before it back to block number `first`."""
        for slot in self._at.get(key >> _SPREAD, _NOTHING):
            if self._first[slot] <= key < self._end[slot]:
                return self._top[slot] <= first
        return False

    def hold(self, keys: "array[int]", blocks: int, now: float) -> int | None:
        """Keep a context in place as far back as it is here from block `blocks` - 1; counts as a use.

        What it extends cannot go before it. Give the result to `unhold`; None: that block is not here.
        """
        slot = self._slot(keys[blocks - 1]) if blocks else None
        if slot is not None:
            self._order.hold([slot])
            self._order.touch([slot], now)
        return slot

    def touch(self, keys: "array[int]", blocks: int, now: float) -> None:
        """Block `blocks` - 1 of a context is used, and with it all before it."""
        slot = self._slot(keys[blocks - 1]) if blocks else None
        if slot is not None:
            self._order.touch([slot], now)

    def unhold(self, slot: int | None) -> None:
        """Let go of what `hold` returned."""
        if slot is not None:
            self._order.unhold([slot])

    def _slot(self, key: int) -> int | None:
        first, end = self._first, self._end
        for slot in self._at.get(key >> _SPREAD, _NOTHING):
            if first[slot] <= key < end[slot]:
                return slot
        return None

    # writing

    def write(
        self, keys: "array[int]", first: int, last: int, now: float, reserved_blocks: int = 0
    ) -> list[tuple[int, int]]:
        """Bring blocks [first, last) of a context here; those written now, as ranges of it.

        What is here already counts as used. Fewer than asked are written when no more can be evicted.
        `reserved_blocks` of the capacity belong to others.
        """
        written: list[tuple[int, int]] = []
        parent = self._slot(keys[first - 1]) if first else None
        self._make_room_beside(parent, last - first, reserved_blocks, now)
        at, limit = first, self.capacity_blocks - reserved_blocks
        while at < last:
            slot = self._slot(keys[at])
            if slot is not None:
                at = self.reach(keys, at, last)
                parent = self._slot(keys[at - 1])
                assert parent is not None
                self._order.touch([parent], now)
                continue
            end = self._gap(keys, at, last)
            if self.used_blocks + end - at > limit or not self._free:
                break
            parent = self._put(keys, at, end, parent, now)
            if written and written[-1][1] == at:
                written[-1] = (written[-1][0], end)
            else:
                written.append((at, end))
            at = end
        return written

    def _make_room_beside(self, slot: int | None, blocks: int, reserved_blocks: int, now: float) -> None:
        """Make room, but not by taking this piece."""
        if self.used_blocks + reserved_blocks + blocks <= self.capacity_blocks and len(self._free) > blocks:
            return
        guarded = [] if slot is None else [slot]
        if guarded:
            self._order.hold(guarded)
        self.make_room(blocks, reserved_blocks, blocks)
        if guarded:
            self._order.unhold(guarded)

    def _gap(self, keys: "array[int]", at: int, last: int) -> int:
        """The end of the next piece to write: consecutive keys that are not here."""
        key, most = keys[at], min(last - at, PIECE_BLOCKS)
        length = most if keys[at + most - 1] == key + most - 1 else _common(keys, at, most)
        for bucket in _buckets(key, length):
            for slot in self._at.get(bucket, _NOTHING):
                if key < self._first[slot] < key + length:
                    length = self._first[slot] - key
        return at + length

    def make_room(self, blocks: int, reserved_blocks: int = 0, pieces: int = 1) -> bool:
        """Evict until `blocks` more, in `pieces`, fit beside `reserved_blocks` of others; whether they do."""
        while self.used_blocks + reserved_blocks + blocks > self.capacity_blocks or len(self._free) < pieces:
            slot = self._order.pop()
            if slot is None:
                return False
            self._take(slot)
        return True

    def _put(self, keys: "array[int]", at: int, end: int, parent: int | None, now: float) -> int:
        slot = self._free.pop()
        before = keys[at - 1] if at else None
        first, blocks = keys[at], end - at
        self._first[slot], self._end[slot], self._parent_key[slot] = first, first + blocks, before
        self._referenced[slot] = self._unreachable[slot] = 0
        for bucket in _buckets(first, blocks):
            self._at.setdefault(bucket, []).append(slot)
        self.used_blocks += blocks
        self._order.add(slot, parent, end, now)
        self._top[slot] = at if parent is None else self._top[parent]
        if parent is None and before is not None:
            self._orphans.setdefault(before, []).append(slot)
        if self._orphans and not self._orphans.keys().isdisjoint(range(first, first + blocks)):
            for key in range(first, first + blocks):
                for child in self._orphans.pop(key, ()):
                    self._order.attach(child, slot)
                    self._rooted(child, self._top[slot])
        self._order.ready(slot, now)
        return slot

    def _rooted(self, slot: int, top: int) -> None:
        """The run of blocks to which this piece and all that extend it belong begins at block number `top`."""
        order, waiting = self._order, [slot]
        while waiting:
            slot = waiting.pop()
            self._top[slot] = top
            link = order.first_child[slot]
            while link:
                waiting.append(link - 1)
                link = order.next_sibling[link - 1]

    def _take(self, slot: int) -> None:
        first, before = self._first[slot], self._parent_key[slot]
        blocks = self._end[slot] - first
        depth = self._order.depth[slot]
        for child in self._order.remove(slot):
            key = self._parent_key[child]
            assert key is not None
            self._orphans.setdefault(key, []).append(child)
            self._rooted(child, depth)
        if before is not None and before in self._orphans:
            waiting = self._orphans[before]
            if slot in waiting:
                waiting.remove(slot)
                if not waiting:
                    del self._orphans[before]
        for bucket in _buckets(first, blocks):
            here = self._at[bucket]
            here.remove(slot)
            if not here:
                del self._at[bucket]
        self.used_blocks -= blocks
        self.referenced_blocks -= self._referenced[slot].bit_count()
        self._free.append(slot)
        if self._evicted is not None:
            self._evicted(Gone(before, first, blocks))

    # what the directory says

    def refer(self, runs: Sequence[KeyRun], *, referenced: bool, unreachable: bool) -> None:
        """The directory's word on copies here. A piece is referenced while any block of it is, unreachable when all."""
        marks: dict[int, int] = {}
        claimed, beyond = self._referenced, self._unreachable
        for slot, first, last in self._pieces(runs):
            blocks = (1 << last) - (1 << first)
            before, lost = claimed[slot], beyond[slot]
            after = before | blocks if referenced else before & ~blocks
            if after != before:
                claimed[slot] = after
                self.referenced_blocks += after.bit_count() - before.bit_count()
            if unreachable or lost:
                lost = beyond[slot] = lost | blocks if unreachable else lost & ~blocks
            gone = lost and lost == (1 << self._end[slot] - self._first[slot]) - 1
            marks[slot] = (REFERENCED if after else 0) | (UNREACHABLE if gone else 0)
        flags, by_bits = self._order.flags, dict[int, list[int]]()
        for slot, bits in marks.items():
            if bits != flags[slot] & _SAID:
                by_bits.setdefault(bits, []).append(slot)
        for bits, slots in by_bits.items():
            self._order.mark(slots, bits)

    def value(self, runs: Sequence[KeyRun], value: int, *, referenced: bool) -> None:
        """What copies here are worth while they are referenced, or are not; a piece has the last word on any block."""
        slots = list({slot: None for slot, _, _ in self._pieces(runs)})
        if slots:
            self._order.value(slots, value, referenced=referenced)

    def _pieces(self, runs: Sequence[KeyRun]) -> list[tuple[int, int, int]]:
        """Which pieces these keys lie in, and from which block of a piece to which."""
        found: list[tuple[int, int, int]] = []
        for key, blocks in runs:
            end = key + blocks
            while key < end:
                slot = self._slot(key)
                if slot is None:
                    key += 1
                    continue
                first, stop = self._first[slot], min(end, self._end[slot])
                found.append((slot, key - first, stop - first))
                key = stop
        return found

    def check(self) -> None:
        """Sizes, holds and places agree with the order's."""
        order = self._order
        order.check()
        live = [slot for slot in range(self._slots) if order.present[slot]]
        assert len(live) + len(self._free) == self._slots
        assert self.used_blocks == sum(self._end[slot] - self._first[slot] for slot in live) <= self.capacity_blocks
        assert self.referenced_blocks == sum(self._referenced[slot].bit_count() for slot in live)
        for slot in live:
            assert self._slot(self._first[slot]) == slot
            assert self._slot(self._end[slot] - 1) == slot
            parent = order.parent[slot]
            assert not parent or self._top[slot] == self._top[parent - 1]
            orphan = not parent and self._parent_key[slot] is not None
            assert orphan == (slot in self._orphans.get(self._parent_key[slot] or 0, ()))


def _buckets(first: int, blocks: int) -> tuple[int, ...]:
    """Where a piece is found: it has no more keys than a bucket has."""
    low, high = first >> _SPREAD, (first + blocks - 1) >> _SPREAD
    return (low,) if low == high else (low, high)


def _common(keys: "array[int]", at: int, most: int) -> int:
    """How many keys from `at` on are consecutive, knowing that not all of `most` are."""
    start = keys[at] - at
    return bisect_left(range(most), 1, key=lambda i: int(keys[at + i] != start + at + i))
