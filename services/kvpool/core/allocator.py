"""The lives of slots: free, being written, committed, or set aside because a former writer may still write."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

FREE, WRITING, COMMITTED, ASIDE = range(4)


@dataclass
class _Aside:
    """Slots kept from use until their former writer has ended, at the latest until `until_s`."""

    until_s: float
    slots: list[int]


class Allocator:
    """Hands out slots; the generation of a slot rises each time, so that no two lives of it are taken for one.

    Freed slots are handed out again last-freed first: chains evicted from their end come back in ascending order.
    """

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"{slots} slots, a pool needs at least 1")
        self.capacity = slots
        self.generation = array("Q", bytes(8 * slots))
        self.state = bytearray(slots)
        self._free = list(range(slots - 1, -1, -1))
        self._writer = array("Q", bytes(8 * slots))
        self._written_by: dict[int, dict[int, None]] = {}
        self._aside: dict[int, _Aside] = {}

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def writing_slots(self) -> int:
        return sum(len(slots) for slots in self._written_by.values())

    @property
    def aside_slots(self) -> int:
        return sum(len(aside.slots) for aside in self._aside.values())

    def restore(self, generations: Iterable[int], committed: Iterable[int], aside: list[int], until_s: float) -> None:
        """Take over what a former life of the pool left: `aside` slots had a writer that may still be at work."""
        self.generation = array("Q", generations)
        for slot in committed:
            self.state[slot] = COMMITTED
        for slot in aside:
            self.state[slot] = ASIDE
        self._free = [slot for slot in range(self.capacity - 1, -1, -1) if self.state[slot] == FREE]
        if aside:
            self._aside[0] = _Aside(until_s, list(aside))

    def take(self, owner: int) -> int | None:
        """A free slot for `owner` (not 0) to write, in a new generation; None if there is none."""
        if not self._free:
            return None
        slot = self._free.pop()
        self.generation[slot] += 1
        self.state[slot] = WRITING
        self._writer[slot] = owner
        mine = self._written_by.get(owner)
        if mine is None:
            mine = self._written_by[owner] = {}
        mine[slot] = None
        return slot

    def is_writer(self, owner: int, slot: int, generation: int) -> bool:
        """Whether `owner` holds this slot for writing in this generation."""
        if not 0 <= slot < self.capacity or self.state[slot] != WRITING:
            return False
        return self._writer[slot] == owner and self.generation[slot] == generation

    def commit(self, slot: int) -> None:
        """The writer of a slot is done with it."""
        self._leave_writer(slot)
        self.state[slot] = COMMITTED

    def free(self, slot: int) -> None:
        """Give a written or committed slot back for use."""
        if self.state[slot] == WRITING:
            self._leave_writer(slot)
        self.state[slot] = FREE
        self._free.append(slot)

    def _leave_writer(self, slot: int) -> None:
        owner = self._writer[slot]
        mine = self._written_by[owner]
        del mine[slot]
        if not mine:
            del self._written_by[owner]

    def written_by(self, owner: int) -> list[int]:
        """The slots `owner` holds for writing, in the order they were given out."""
        return list(self._written_by.get(owner, ()))

    def set_aside(self, owner: int, until_s: float) -> None:
        """Keep what `owner` was writing, now and when this was said before, from use until `end_owner` or `until_s`."""
        slots = self.written_by(owner)
        for slot in slots:
            self._leave_writer(slot)
            self.state[slot] = ASIDE
        earlier = self._aside.get(owner)
        if slots or earlier:
            self._aside[owner] = _Aside(until_s, slots + (earlier.slots if earlier else []))

    def has_aside(self, owner: int) -> bool:
        """Whether slots wait for this owner's end."""
        return owner in self._aside

    def end_owner(self, owner: int) -> list[int]:
        """`owner` will write no more: its slots set aside are free again and returned."""
        aside = self._aside.pop(owner, None)
        return self._return_aside(aside.slots) if aside else []

    def expire(self, now_s: float) -> list[int]:
        """Free and return the slots set aside until `now_s` or earlier."""
        due = [owner for owner, aside in self._aside.items() if aside.until_s <= now_s]
        return [slot for owner in due for slot in self.end_owner(owner)]

    def _return_aside(self, slots: list[int]) -> list[int]:
        for slot in slots:
            self.state[slot] = FREE
        self._free.extend(reversed(slots))
        return slots

    def check(self) -> None:
        """Every slot is in exactly one place."""
        aside = [slot for entry in self._aside.values() for slot in entry.slots]
        by_owner = {slot: owner for owner, slots in self._written_by.items() for slot in slots}
        for state, slots in ((FREE, self._free), (WRITING, list(by_owner)), (ASIDE, aside)):
            assert len(set(slots)) == len(slots), f"slots of state {state} appear twice"
            assert set(slots) == {s for s in range(self.capacity) if self.state[s] == state}, f"state {state} differs"
        assert all(self._writer[slot] == owner for slot, owner in by_owner.items()), "the tables of writers differ"
