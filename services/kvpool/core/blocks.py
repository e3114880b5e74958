"""The blocks of one pool: their slots, their tree, their way in and out, and what the log says of it."""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from schemas.block_key import short_key
from schemas.kv import Tier
from schemas.pool import SlotInfo
from services.kvpool.core.allocator import COMMITTED, Allocator
from services.kvpool.core.eviction import REFERENCED, UNREACHABLE, EvictionOrder
from services.kvpool.core.index import BlockIndex
from services.kvpool.core.locations import LocationLog


@dataclass
class Effects:
    """What to do to the arena: slots no reader may see any more, then slots given out, then blocks now readable, then
    what is to be remembered of blocks in slots."""

    freed: list[int] = field(default_factory=list)
    begun: list[tuple[int, int, bytes, bytes]] = field(default_factory=list)
    """(slot, generation, digest, digest before)"""
    committed: list[tuple[int, int, bytes]] = field(default_factory=list)
    """(slot, length, fingerprint)"""
    shown: list[tuple[int, bytes]] = field(default_factory=list)
    """(slot, sha256 of each medium in its block)"""


@dataclass
class Counters:
    """Totals since the start."""

    evicted_unreachable: int = 0
    evicted_unreferenced: int = 0
    evicted_referenced: int = 0
    refused_no_room: int = 0
    refused_collision: int = 0
    stale_commits: int = 0
    expired_pins: int = 0
    expired_leases: int = 0
    discarded: int = 0


@dataclass(frozen=True)
class AdoptedBlock:
    """A committed block found in the arena of a former life of the pool; `parent` b"" at the start of a context,
    `media` the sha256 of each medium in it."""

    slot: int
    digest: bytes
    parent: bytes
    length: int
    fingerprint: bytes
    media: bytes = b""


class Presence(Enum):
    """Whether a block can be read here, is being written here, or neither."""

    READABLE = "readable"
    WRITING = "writing"
    ABSENT = "absent"


class BlockTable:
    """Brings blocks in (`begin`, `commit`) and takes them out (`make_room`, `withdraw`), in all tables at once.

    A block withdrawn while somebody reads it can be found by nobody; its slot is free when the last reader lets go.
    """

    def __init__(self, node: str, incarnation: int, capacity_blocks: int, order: EvictionOrder | None = None) -> None:
        self.log = LocationLog(node, incarnation)
        self.index = BlockIndex(capacity_blocks)
        self.slots = Allocator(capacity_blocks)
        self.order = order or EvictionOrder(capacity_blocks)
        self.counters = Counters()
        self.unverified: set[int] = set()
        """Slots of adopted blocks whose fingerprint nobody has checked yet."""
        self._doomed: set[int] = set()

    def is_readable(self, slot: int) -> bool:
        """Whether the slot holds a committed block that has not been withdrawn."""
        return self.slots.state[slot] == COMMITTED and slot not in self._doomed

    def presence(self, digest: bytes) -> Presence:
        """Where this block stands."""
        slot = self.index.find(digest)
        if slot is None:
            return Presence.ABSENT
        return Presence.READABLE if self.is_readable(slot) else Presence.WRITING

    def readable(self, digests: bytes) -> list[int | None]:
        """The slot of each of these packed digests that can be read."""
        found = self.index.find_all(digests)
        if not self._doomed and None not in found:
            states = np.frombuffer(self.slots.state, np.uint8)[np.array(found, np.intp)]
            if (states == COMMITTED).all():
                return found
        return [s if s is not None and self.is_readable(s) else None for s in found]

    def info(self, slot: int) -> SlotInfo:
        """Where a readable block lies."""
        return self.index.info(slot, self.slots.generation[slot])

    def newly_shown(self) -> Effects:
        """Media that were spoken of since this was asked last, of blocks that are here or being written."""
        news = [(self.index.slot_of.get(key), shown) for key, shown in self.log.take_noted().items()]
        return Effects(shown=[(slot, shown) for slot, shown in news if slot is not None])

    def make_room(self, blocks: int, effects: Effects) -> None:
        """Evict until `blocks` slots are free or nothing more may go."""
        while self.slots.free_slots < blocks:
            victim = self.order.pop()
            if victim is None:
                return
            flags = self.order.flags[victim]
            if flags & UNREACHABLE:
                self.counters.evicted_unreachable += 1
            elif flags & REFERENCED:
                self.counters.evicted_referenced += 1
            else:
                self.counters.evicted_unreferenced += 1
            self.withdraw(victim, effects)

    def begin(
        self, key: int, digest: bytes, parent: bytes, owner: int, now_s: float, at: int, effects: Effects
    ) -> tuple[int, int] | None:
        """A slot, in its generation, for a block that is not here, the `at`-th of its context.

        None if there is no room, or if another digest of its short key is here.
        """
        if key in self.index.slot_of:
            self.counters.refused_collision += 1
            return None
        slot = self.slots.take(owner)
        if slot is None:
            self.counters.refused_no_room += 1
            return None
        self._place(slot, key, digest, parent, now_s, at)
        generation = self.slots.generation[slot]
        effects.begun.append((slot, generation, digest, parent))
        if key in self.log.media:
            effects.shown.append((slot, self.log.media[key]))
        return slot, generation

    def _place(self, slot: int, key: int, digest: bytes, parent: bytes, now_s: float, at: int) -> None:
        """Enter a block into index and tree, between the blocks here that come before and after it."""
        before, after = self.index.insert(slot, key, digest, short_key(parent) if parent else 0)
        self.order.add(slot, before, at if before is None else self.order.depth[before] + 1, now_s)
        for child in after:
            self.order.attach(child, slot)

    def commit(self, slot: int, length: int, fingerprint: bytes, now_s: float, effects: Effects) -> None:
        """A block is written: readable from now on."""
        self.slots.commit(slot)
        self._seal(slot, length, fingerprint, now_s)
        effects.committed.append((slot, length, fingerprint))

    def _seal(self, slot: int, length: int, fingerprint: bytes, now_s: float) -> None:
        self.index.seal(slot, length, fingerprint)
        self.order.ready(slot, now_s)
        self.log.stored(Tier.L2, self.index.keys[slot], self.index.parent_key(slot))

    def withdraw(self, slot: int, effects: Effects) -> None:
        """Take a written or committed block out."""
        if self.slots.state[slot] == COMMITTED:
            self.log.removed(Tier.L2, self.index.keys[slot], self.index.parent_key(slot))
        self._forget(slot)
        effects.freed.append(slot)
        if self.order.holds[slot]:
            self._doomed.add(slot)
        else:
            self.slots.free(slot)

    def _forget(self, slot: int) -> None:
        self.index.remove(slot, self.order.remove(slot))
        if self.unverified:
            self.unverified.discard(slot)

    def unhold(self, slots: list[int]) -> None:
        """Readers let go of these slots."""
        loose = self.order.unhold(slots)
        if self._doomed:
            for slot in self._doomed.intersection(loose):
                self._doomed.discard(slot)
                self.slots.free(slot)

    def set_aside(self, owner: int, until_s: float) -> None:
        """Take out what `owner` was writing and keep its slots from use: it may still write."""
        for slot in self.slots.written_by(owner):
            self._forget(slot)
        self.slots.set_aside(owner, until_s)

    def adopt(
        self, generations: list[int], blocks: list[AdoptedBlock], torn: list[int], now_s: float, until_s: float
    ) -> Effects:
        """Take over an arena: its committed blocks, and `torn` slots whose writer may be at work until `until_s`.

        All blocks count as used now and unverified. Of two blocks of one short key the later one is freed.
        """
        unique: dict[bytes, AdoptedBlock] = {}
        for block in blocks:
            unique.setdefault(block.digest[:8], block)
        self.slots.restore(generations, (block.slot for block in unique.values()), torn, until_s)
        self.unverified = {block.slot for block in unique.values()}
        freed = [block.slot for block in blocks if block.slot not in self.unverified]
        self.log.adopt_media((short_key(block.digest), block.media) for block in unique.values() if block.media)
        waiting = dict(unique)
        for block in unique.values():
            chain: list[AdoptedBlock] = []
            at = waiting.pop(block.digest[:8], None)
            while at is not None:
                chain.append(at)
                at = waiting.pop(at.parent[:8], None)
            for at in reversed(chain):
                self._place(at.slot, short_key(at.digest), at.digest, at.parent, now_s, 0)
                self._seal(at.slot, at.length, at.fingerprint, now_s)
        return Effects(freed=freed)

    def check(self, held: dict[int, int]) -> None:
        """The tables agree on every slot; `held` counts the holds of each."""
        for part in (self.slots, self.index, self.order, self.log):
            part.check()
        for slot in range(self.slots.capacity):
            assert self.order.holds[slot] == held.get(slot, 0), f"slot {slot}: holds are miscounted"
            found = self.index.slot_of.get(self.index.keys[slot]) == slot
            assert found == bool(self.order.present[slot]), f"slot {slot}: index and tree differ"
            if slot in self._doomed:
                assert self.slots.state[slot] == COMMITTED, f"slot {slot} was withdrawn and is not committed"
                assert slot in held, f"slot {slot} waits for no reader"
                assert not found, f"slot {slot} was withdrawn and can be found"
        assert len(self.index) == sum(self.order.present), "index and tree differ in size"
        assert all(self.is_readable(slot) for slot in self.unverified), "a block that is gone waits for its check"
