"""The core of a node's KV pool: which block is in which slot, who may write or read it, what goes when room is needed.

Pure: every method takes a message and the time (monotonic seconds) and returns its answer and the effects that the
shell carries out on the arena, in the order of the fields of `Effects`.
"""

import math
from collections.abc import Iterable, Iterator

import numpy as np

from schemas.kv import BlockMedia, KvReference, LocationChange, keys_of
from schemas.pool import (
    DIGEST_BYTES,
    AllocateReply,
    AllocateRequest,
    CommitReply,
    CommitRequest,
    LeaseRequest,
    PoolStatus,
    SlotInfo,
    digests_of,
)
from services.kvpool.core.blocks import AdoptedBlock, BlockTable, Effects, Presence
from services.kvpool.core.eviction import REFERENCED, UNREACHABLE, EvictionOrder
from services.kvpool.core.index import FINGERPRINT_BYTES, keys_of_digests
from services.kvpool.core.leases import Holds
from services.kvpool.core.snapshot import FrozenTree, Snapshot

SLICE_KEYS = 4096
PIN_TTL_S = 3600.0
ASIDE_S = 30.0


class PoolCore:
    """One node's pool. Blocks being written, pinned or leased are never evicted.

    `owner` is whoever writes or pins: a connection or a transfer, any number but 0; what it holds ends with it.
    `order`: another order of eviction, for comparison.
    """

    def __init__(
        self,
        node: str,
        incarnation: int,
        capacity_blocks: int,
        *,
        pin_ttl_s: float = PIN_TTL_S,
        aside_s: float = ASIDE_S,
        order: EvictionOrder | None = None,
    ) -> None:
        self.blocks = BlockTable(node, incarnation, capacity_blocks, order)
        self.log = self.blocks.log
        self.counters = self.blocks.counters
        self.pins, self.leases = Holds(), Holds()
        self._order, self._index, self._slots = self.blocks.order, self.blocks.index, self.blocks.slots
        self._pin_ttl_s, self.aside_s = pin_ttl_s, aside_s
        self._marks: bytearray | None = None

    # probes: they change nothing

    def locate(self, digests: bytes) -> int:
        """How many leading blocks are here and readable."""
        return len(self._leading(digests))

    def _leading(self, digests: bytes) -> list[int]:
        found = self.blocks.readable(digests)
        return [slot for slot in (found[: found.index(None)] if None in found else found) if slot is not None]

    def presence(self, digest: bytes) -> Presence:
        """Where this block stands."""
        return self.blocks.presence(digest)

    # writing

    def allocate(
        self, request: AllocateRequest, owner: int, now_s: float, first: int = 0
    ) -> tuple[AllocateReply, Effects]:
        """Slots to write these blocks into; `first` is the index of the first one in its context, if it is known.

        Blocks that are here already count as used. Once one is refused (no room, or its short key is taken by another
        digest), so are all that follow.
        """
        effects = Effects()
        found = self._index.find_all(request.digests)
        before = self._index.find(request.parent) if request.parent else None
        guarded = [slot for slot in (before, *found) if slot is not None]
        self._order.hold(guarded)
        self._order.touch(guarded, now_s)
        self.blocks.make_room(found.count(None), effects)
        granted: list[tuple[int, int] | None] = []
        refused = 0
        parent = request.parent
        keys = keys_of_digests(request.digests)
        for i, digest in enumerate(digests_of(request.digests)):
            slot: tuple[int, int] | None = None
            if found[i] is None and (keys[i] not in self._index.slot_of or self._index.find(digest) is None):
                slot = None if refused else self.blocks.begin(keys[i], digest, parent, owner, now_s, first + i, effects)
                refused += slot is None
            granted.append(slot)
            parent = digest
        self.blocks.unhold(guarded)
        if self._marks is not None:
            for begun in effects.begun:
                self._marks[begun[0]] = 0
        return AllocateReply(slots=granted, refused=refused), effects

    def commit(self, request: CommitRequest, owner: int, now_s: float) -> tuple[CommitReply, Effects]:
        """These slots are written. What `owner` does not hold in that generation is counted and left alone."""
        effects = Effects()
        for slot, generation, length, fingerprint in request.slots:
            if self._slots.is_writer(owner, slot, generation) and len(fingerprint) == FINGERPRINT_BYTES:
                self.blocks.commit(slot, length, fingerprint, now_s, effects)
            else:
                self.counters.stale_commits += 1
        for slot, generation in request.abandon:
            if self._slots.is_writer(owner, slot, generation):
                self.blocks.withdraw(slot, effects)
        return CommitReply(committed=len(effects.committed)), effects

    def discard(self, slot: int, generation: int) -> Effects:
        """The bytes of this block are wrong: no reader gets it again. A stale pair does nothing."""
        effects = Effects()
        if self._slots.generation[slot] == generation and self.blocks.is_readable(slot):
            self.counters.discarded += 1
            self.blocks.withdraw(slot, effects)
        return effects

    # reading

    def lease(self, request: LeaseRequest, now_s: float) -> list[SlotInfo]:
        """Hold the leading run that is here for a peer; a lease of the same id is replaced."""
        self.blocks.unhold(self.leases.open(request.id, None, now_s + request.ttl_s))
        leading = self._leading(request.digests)
        self._hold(self.leases, request.id, leading, now_s)
        return [self.blocks.info(slot) for slot in leading]

    def open_pin(self, id_: str, owner: int | None, now_s: float, ttl_s: float | None = None) -> None:
        """Begin a pin without blocks; one of the same id ends. Ends by itself after `ttl_s`."""
        self.blocks.unhold(self.pins.open(id_, owner, now_s + (self._pin_ttl_s if ttl_s is None else ttl_s)))

    def pin(self, id_: str, digests: bytes, now_s: float) -> list[int | None]:
        """Hold those of these blocks that are readable, gaps or not: the slot of each, None where it is not.

        Nothing is held for an id that is not open (any more): it was released or has expired.
        """
        if id_ not in self.pins:
            return [None] * (len(digests) // DIGEST_BYTES)
        found = self.blocks.readable(digests)
        self._hold(self.pins, id_, [slot for slot in found if slot is not None], now_s)
        return found

    def keep_pinned(self, id_: str, slots: Iterable[int]) -> None:
        """Let go of all that the pin holds but these."""
        self.blocks.unhold(self.pins.keep(id_, slots))

    def unpin(self, id_: str) -> None:
        """End a pin; an unknown id is fine."""
        self.blocks.unhold(self.pins.release(id_))

    def end_lease(self, id_: str) -> None:
        """End a lease; an unknown id is fine."""
        self.blocks.unhold(self.leases.release(id_))

    def _hold(self, holds: Holds, id_: str, slots: list[int], now_s: float) -> None:
        self._order.hold(holds.add(id_, slots))
        self._order.touch(slots, now_s)

    # time and loss

    def drop_owner(self, owner: int, now_s: float, *, ends: bool = True) -> None:
        """The owner is lost, or too late: its pins end, what it was writing is set aside.

        It may write on: `end_owner` frees those slots when it is known to have ended; time does so otherwise, unless
        `ends` is False because that end will be told.
        """
        self.blocks.unhold(self.pins.drop_owner(owner))
        self.blocks.set_aside(owner, now_s + self.aside_s if ends else math.inf)

    def is_awaited(self, owner: int) -> bool:
        """Whether slots are set aside until this owner has ended."""
        return self._slots.has_aside(owner)

    def end_owner(self, owner: int, now_s: float) -> Effects:
        """The owner has ended: nothing of it is held and nothing it was writing will change any more."""
        self.drop_owner(owner, now_s)
        return Effects(freed=self._slots.end_owner(owner))

    def tick(self, now_s: float) -> Effects:
        """End what has run out: leases, pins, and the wait for former writers."""
        pins, slots = self.pins.expire(now_s)
        self.counters.expired_pins += pins
        self.blocks.unhold(slots)
        leases, slots = self.leases.expire(now_s)
        self.counters.expired_leases += leases
        self.blocks.unhold(slots)
        return Effects(freed=self._slots.expire(now_s))

    # what others say

    def refer(self, message: KvReference) -> Iterator[None]:
        """Apply the directory's word to the blocks that are here, in slices: run it to its end, one at a time."""
        marks = self._marks = bytearray(self._slots.capacity) if message.full else None
        for change in message.changes:
            bits = (REFERENCED if change.referenced else 0) | (UNREACHABLE if change.unreachable else 0)
            for slots in self._slices(change.hashes):
                if marks is None:
                    self._order.mark(slots, bits)
                else:
                    for slot in slots:
                        marks[slot] = bits
                yield
        if marks is not None:
            yield from self._sweep(marks)
            self._marks = None
            self._order.forget_values()
        for worth in message.values:
            for slots in self._slices(worth.hashes):
                self._order.value(slots, worth.value, referenced=worth.referenced)
                yield

    def _slices(self, hashes: bytes) -> Iterator[list[int]]:
        """The slots of those of these keys that are here, in slices."""
        keys = keys_of(hashes)
        for start in range(0, len(keys), SLICE_KEYS):
            found = map(self._index.slot_of.get, keys[start : start + SLICE_KEYS].tolist())
            yield [slot for slot in found if slot is not None]

    def _sweep(self, marks: bytearray) -> Iterator[None]:
        """Bring every block to what a full message said, or did not say, of it."""
        flags = np.frombuffer(bytes(self._order.flags), np.uint8) & (REFERENCED | UNREACHABLE)
        differing = np.flatnonzero(flags != np.frombuffer(bytes(marks), np.uint8))
        for start in range(0, len(differing), SLICE_KEYS):
            by_bits: dict[int, list[int]] = {}
            for slot in differing[start : start + SLICE_KEYS].tolist():
                if self._order.present[slot]:
                    by_bits.setdefault(marks[slot], []).append(slot)
            for bits, slots in by_bits.items():
                self._order.mark(slots, bits)
            yield

    def note_media(self, digests: bytes, marks: Iterable[BlockMedia]) -> Effects:
        """Which of these blocks hold media, so that their locations say so."""
        self.log.note_media(keys_of_digests(digests), marks)
        return self.blocks.newly_shown()

    def device(self, changes: Iterable[LocationChange]) -> Effects:
        """What the engine says of device memory; RejectedMessage for anything else."""
        self.log.device(changes)
        return self.blocks.newly_shown()

    def engine_lost(self) -> None:
        """The engine is gone and its device memory with it."""
        self.log.clear_device()

    # a former life

    def adopt(self, generations: list[int], blocks: list[AdoptedBlock], torn: list[int], now_s: float) -> Effects:
        """Take over an arena: its committed blocks, and `torn` slots whose writer may still be at work."""
        return self.blocks.adopt(generations, blocks, torn, now_s, now_s + self.aside_s)

    def unverified(self, slots: Iterable[int | None]) -> list[SlotInfo]:
        """Those of these slots whose fingerprint has to be checked before anybody reads them."""
        waiting = self.blocks.unverified
        return [self.blocks.info(slot) for slot in slots if slot in waiting] if waiting else []

    def verified(self, slot: int, generation: int) -> bool:
        """The fingerprint of an adopted block is right; False for a stale pair."""
        fresh = self._slots.generation[slot] == generation and slot in self.blocks.unverified
        if fresh:
            self.blocks.unverified.discard(slot)
        return fresh

    # views

    def freeze(self, id_: str) -> Snapshot:
        """Everything the node holds as of the last numbered message; take the pending changes first."""
        assert not self.log.pending, "a snapshot as of a number needs every change to have one"
        tree = FrozenTree(
            keys=self._index.keys[:],
            parents=self._index.parents[:],
            parent=self._order.parent[:],
            first_child=self._order.first_child[:],
            next_sibling=self._order.next_sibling[:],
            flags=bytes(self._order.flags),
        )
        return Snapshot(
            id_, self.log.node, self.log.incarnation, self.log.seq, dict(self.log.l1), tree, dict(self.log.media)
        )

    def status(self) -> PoolStatus:
        """What the heartbeat of the node needs."""
        return PoolStatus(
            incarnation=self.log.incarnation,
            used_blocks=self._slots.capacity - self._slots.free_slots,
            total_blocks=self._slots.capacity,
            referenced_blocks=self._order.referenced_blocks,
            pinned_blocks=self._order.held_blocks,
            leases=len(self.leases),
            last_kv_seq=self.log.seq,
        )

    def check(self) -> None:
        """The invariants of the parts, and that they agree on every slot."""
        self.pins.check()
        self.leases.check()
        held = self.pins.counts()
        for slot, count in self.leases.counts().items():
            held[slot] = held.get(slot, 0) + count
        self.blocks.check(held)
