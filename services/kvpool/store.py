"""The core and its arena, kept in step: every call goes through the core, its effects to the arena at once."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

from schemas.kv import BlockMedia, KvReference, LocationChange
from schemas.pool import AllocateReply, AllocateRequest, CommitReply, CommitRequest, LeaseReply, LeaseRequest, SlotInfo
from services.arena import ArenaIdentity
from services.clock import Clock
from services.kvpool.arena import Arena, Found
from services.kvpool.core.blocks import Effects
from services.kvpool.core.pool import PoolCore

VERIFY_AT_ONCE = 32
"""Adopted blocks whose fingerprints are checked in one go off the loop."""


class Store:
    """What the servers, the fetcher and the publisher share. All calls on the event loop.

    `on_change` callbacks run after each call that may have made blocks readable, taken them away or freed slots.
    """

    def __init__(self, core: PoolCore, arena: Arena, clock: Clock, *, debug_checks: bool = False) -> None:
        self.core, self.arena = core, arena
        self._clock, self._debug_checks = clock, debug_checks
        self._listeners: dict[Callable[[], None], None] = {}
        self._owners = 0
        self.rejected_fingerprints = 0

    @classmethod
    def adopt(cls, core: PoolCore, arena: Arena, found: Found, clock: Clock, *, debug_checks: bool = False) -> "Store":
        """A store over an arena that was just opened; readers are let in."""
        effects = core.adopt(found.generations, found.blocks, found.torn, clock.now())
        arena.go_live(found.blocks, effects)
        return cls(core, arena, clock, debug_checks=debug_checks)

    @property
    def identity(self) -> ArenaIdentity:
        return self.arena.layout.identity

    @property
    def path(self) -> Path:
        return self.arena.path

    def new_owner(self) -> int:
        """A number for a connection or a transfer."""
        self._owners += 1
        return self._owners

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` after changes, until the function returned is called."""
        self._listeners[listener] = None
        return lambda: self._listeners.pop(listener, None)

    def _perform(self, effects: Effects) -> None:
        self.arena.perform(effects)
        self._changed()

    def _changed(self) -> None:
        if self._debug_checks:
            self.core.check()
            self.arena.check()
        for listener in list(self._listeners):
            listener()

    def allocate(self, request: AllocateRequest, owner: int, first: int = 0) -> AllocateReply:
        """See `PoolCore.allocate`."""
        reply, effects = self.core.allocate(request, owner, self._clock.now(), first)
        self._perform(effects)
        return reply

    def commit(self, request: CommitRequest, owner: int) -> CommitReply:
        """See `PoolCore.commit`; blocks longer than a slot are not committed."""
        limit = self.arena.layout.slot_bytes
        if any(length > limit for _, _, length, _ in request.slots):
            kept = [entry for entry in request.slots if entry[2] <= limit]
            long = [(slot, generation) for slot, generation, length, _ in request.slots if length > limit]
            request = CommitRequest(slots=kept, abandon=[*request.abandon, *long])
        reply, effects = self.core.commit(request, owner, self._clock.now())
        self._perform(effects)
        return reply

    def lease(self, request: LeaseRequest) -> list[SlotInfo]:
        """See `PoolCore.lease`."""
        return self.core.lease(request, self._clock.now())

    def end_lease(self, id_: str) -> None:
        """See `PoolCore.end_lease`."""
        self.core.end_lease(id_)
        self._changed()

    def open_pin(self, id_: str, owner: int | None, ttl_s: float | None = None) -> None:
        """See `PoolCore.open_pin`."""
        self.core.open_pin(id_, owner, self._clock.now(), ttl_s)

    def pin(self, id_: str, digests: bytes) -> list[int | None]:
        """See `PoolCore.pin`."""
        return self.core.pin(id_, digests, self._clock.now())

    def unpin(self, id_: str) -> None:
        """See `PoolCore.unpin`."""
        self.core.unpin(id_)
        self._changed()

    def drop_owner(self, owner: int, *, ends: bool = True) -> None:
        """See `PoolCore.drop_owner`."""
        self.core.drop_owner(owner, self._clock.now(), ends=ends)
        self._changed()

    def end_owner(self, owner: int) -> None:
        """See `PoolCore.end_owner`."""
        self._perform(self.core.end_owner(owner, self._clock.now()))

    def tick(self) -> None:
        """See `PoolCore.tick`."""
        self._perform(self.core.tick(self._clock.now()))

    def refer(self, message: KvReference) -> Iterator[None]:
        """See `PoolCore.refer`."""
        return self.core.refer(message)

    def device(self, changes: list[LocationChange]) -> None:
        """See `PoolCore.device`."""
        self._perform(self.core.device(changes))

    def note_media(self, digests: bytes, marks: list[BlockMedia]) -> None:
        """See `PoolCore.note_media`."""
        self.arena.perform(self.core.note_media(digests, marks))

    def engine_lost(self) -> None:
        """See `PoolCore.engine_lost`."""
        self.core.engine_lost()
        self._changed()

    async def verify(self, slots: list[int | None]) -> bool:
        """Check the fingerprints of those slots that nobody has checked since they were adopted, off the loop.

        The caller holds the slots. Wrong blocks are discarded; False if there were any.
        """
        waiting = self.core.unverified(slots)
        for start in range(0, len(waiting), VERIFY_AT_ONCE):
            part = waiting[start : start + VERIFY_AT_ONCE]
            right = await asyncio.to_thread(self._match, part)
            for info, good in zip(part, right, strict=True):
                if not good:
                    self.rejected_fingerprints += 1
                    self._perform(self.core.discard(info.slot, info.generation))
                elif self.core.verified(info.slot, info.generation):
                    self.arena.mark_verified(info.slot)
        return all(self.core.blocks.is_readable(info.slot) for info in waiting)

    def _match(self, infos: list[SlotInfo]) -> list[bool]:
        return [self.arena.matches(info.slot, info.length, info.fingerprint) for info in infos]

    def lease_reply(self, slots: list[SlotInfo], host: str, session: str = "", base_address: int = 0) -> LeaseReply:
        """The answer to a lease: the blocks, and every way to reach them."""
        return LeaseReply(
            slots=slots,
            incarnation=self.core.log.incarnation,
            host=host,
            arena=str(self.path.absolute()),
            session=session,
            base_address=base_address,
            slot_bytes=self.arena.layout.slot_bytes,
            layout=str(self.identity),
        )
