"""What a transport is asked for and what it reports."""

import asyncio
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from schemas.pool import LeaseReply, SlotInfo


class TransportError(Exception):
    """Nothing was started: the peer cannot be reached this way; the text says why."""


class Outcome(StrEnum):
    """What became of one block.

    ARRIVED: checked against the fingerprint, may be committed. STALE: the peer's slot has another life by now.
    CORRUPT: the bytes are not those of the fingerprint. FAILED: the transport said so. SKIPPED: never begun.
    UNSETTLED: nobody knows whether the slot will still be written; it must not be used again.
    """

    PENDING = "pending"
    ARRIVED = "arrived"
    STALE = "stale"
    CORRUPT = "corrupt"
    FAILED = "failed"
    SKIPPED = "skipped"
    UNSETTLED = "unsettled"


class BlockCopy(NamedTuple):
    """One block: where it lies at the peer, its digest, and the own slot it goes to."""

    source: SlotInfo
    digest: bytes
    slot: int


class CopyJob:
    """A copy under way. Destination slots may be written until `done`, which then holds, or raises, how it ended."""

    def __init__(self, blocks: Sequence[BlockCopy], loop: asyncio.AbstractEventLoop) -> None:
        self.blocks = blocks
        self.outcomes = [Outcome.PENDING] * len(blocks)
        self.stopped = False
        self.done: asyncio.Future[None] = loop.create_future()
        self._loop = loop

    def stop(self) -> None:
        """Begin no further block; `done` comes when those begun have ended."""
        self.stopped = True

    def finish(self, error: BaseException | None = None) -> None:
        """Say from any thread that the copy has ended; blocks that were not begun count as skipped."""
        self.outcomes = [Outcome.SKIPPED if o is Outcome.PENDING else o for o in self.outcomes]
        self._loop.call_soon_threadsafe(self._set_done, error)

    def _set_done(self, error: BaseException | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class Transport(Protocol):
    """One way to read a peer's arena."""

    @property
    def name(self) -> str:
        """What the metrics and replies call it."""
        ...

    def reaches(self, lease: LeaseReply) -> bool:
        """Whether this transport can be tried on this peer."""
        ...

    async def begin(self, lease: LeaseReply, blocks: Sequence[BlockCopy]) -> CopyJob:
        """Start copying leased blocks into own slots; TransportError if nothing was started."""
        ...

    async def close(self) -> None:
        """End when no thread writes any more."""
        ...
