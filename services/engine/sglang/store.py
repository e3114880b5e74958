"""The node's own arena as SGLang's scheduler process sees it: look up, copy out, write in. Never raises, never NATS.

Look-ups read the mapped index and wait for nobody, so the scheduler's thread may do them. Reading and writing are for
background threads. A pool that is away or was started anew only makes blocks absent for a while.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.pool import AllocateRequest, AttachRequest, CommitRequest, SlotInfo
from services.arena import ArenaError, ArenaReader, SlotState, fingerprint_of
from services.local_call import ALLOCATE, COMMIT, BlockingLocalClient, PoolRefused, PoolUnavailable

BATCH_BLOCKS = 128
"""Blocks of one allocate and one commit call."""
_QUIET_S = 10.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Allocation:
    """What the pool gave for a run of blocks: `slots` (slot, generation) to fill with the blocks at `positions`.

    Blocks at other positions are in the arena already, but for `refused` of them, for which there is no room.
    """

    positions: list[int]
    slots: list[tuple[int, int]]
    refused: int


class ArenaStore:
    """One mapping of the node's arena and one connection to its pool."""

    def __init__(self, socket: Path, attach: AttachRequest) -> None:
        self._client = BlockingLocalClient(socket, attach)
        self._reader: ArenaReader | None = None
        self._warned_at = -_QUIET_S

    def connect(self) -> bool:
        """Attach to the pool and map its arena unless that is done; False while the pool is away."""
        reader = self._reader
        alive = reader is not None and reader.live
        if alive and self._client.attached is not None:
            return True
        if reader is not None and not alive:
            self._client.close()  # its other end has gone with the arena
        try:
            attached = self._client.connect()
            if not alive:
                self._reader = ArenaReader(Path(attached.arena), writable=True)
        except (PoolUnavailable, PoolRefused, ArenaError, OSError) as error:
            self._warn("the KV pool is not reachable, blocks are neither restored nor stored: %s", error)
            return False
        return True

    def lookup(self, digests: Sequence[bytes]) -> list[SlotInfo]:
        """The slots of the leading blocks that are in the arena now; none while it is not mapped."""
        reader = self._reader
        if reader is None or not digests or not reader.live:
            return []
        return reader.lookup(b"".join(digests))

    def read(self, slots: Sequence[SlotInfo], buffers: Sequence[Any], offset: int) -> int:
        """Copy the bytes from `offset` on of each block into its buffer (all of it); how many leading blocks are what
        they were when looked up."""
        reader = self._reader
        if reader is None:
            return 0
        for done, (info, buffer) in enumerate(zip(slots, buffers, strict=True)):
            view = reader.view(info.slot)
            _, length, state = reader.life(info.slot)
            buffer[:] = view[offset : offset + len(buffer)]
            unchecked = state is SlotState.ADOPTED and fingerprint_of(view[:length]) != info.fingerprint
            if unchecked or not reader.current(info.slot, info.generation):
                return done
        return len(slots)

    def allocate(self, digests: Sequence[bytes], parent: bytes) -> Allocation | None:
        """Slots for those of at most BATCH_BLOCKS blocks after `parent` that the pool lacks; None if it is away."""
        if len(digests) > BATCH_BLOCKS:
            raise ValueError(f"{len(digests)} blocks in one call, at most {BATCH_BLOCKS}")
        if not self.connect():
            return None
        try:
            reply = self._client.call(ALLOCATE, AllocateRequest(digests=b"".join(digests), parent=parent))
        except (PoolUnavailable, PoolRefused) as error:
            self._warn("blocks could not be stored: %s", error)
            return None
        if self._reader is None or not self._reader.live:
            self._client.close()  # another life of the pool gave these slots out: it takes them back
            return None
        given = [(position, slot) for position, slot in enumerate(reply.slots) if slot is not None]
        return Allocation([position for position, _ in given], [slot for _, slot in given], reply.refused)

    def fill(self, slot: tuple[int, int], offset: int, data: Any) -> bool:
        """Copy `data` to `offset` of a slot that was allocated; False if the slot is not ours any more."""
        reader, (number, generation) = self._reader, slot
        if reader is None:
            return False
        now, _, state = reader.life(number)
        if now != generation or state is not SlotState.WRITING:
            return False
        reader.view(number)[offset : offset + len(data)] = data
        return True

    def commit(self, slots: Sequence[tuple[int, int]], filled: Sequence[bool], length: int) -> bool:
        """Let readers in to the filled slots, blocks of `length` bytes, and give the others back; True if all were."""
        reader = self._reader
        if reader is None:
            return False
        pairs = list(zip(slots, filled, strict=True))
        written = [(n, g, length, fingerprint_of(reader.view(n)[:length])) for (n, g), good in pairs if good]
        request = CommitRequest(slots=written, abandon=[slot for slot, good in pairs if not good])
        try:
            return self._client.call(COMMIT, request).committed == len(slots)
        except (PoolUnavailable, PoolRefused) as error:
            self._warn("blocks could not be stored: %s", error)
            return False

    def close(self) -> None:
        """End the connection; the mapping lives as long as arrays over it."""
        self._client.close()
        self._reader = None

    def _warn(self, text: str, error: Exception) -> None:
        now = time.monotonic()
        if now - self._warned_at >= _QUIET_S:
            self._warned_at = now
            _log.warning(text, error)
