"""The node's own arena as SGLang's scheduler process sees it: look up, copy out, write in. Never raises, never NATS.

Look-ups read the mapped index and wait for nobody, so the scheduler's thread may do them. Reading and writing are for
background threads. A pool that is away or was started anew only makes blocks absent for a while.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from schemas.pool import AllocateRequest, AttachRequest, CommitRequest, SlotInfo
from services.arena import ArenaError, ArenaReader
from services.local_call import ALLOCATE, COMMIT, BlockingLocalClient, PoolRefused, PoolUnavailable

BATCH_BLOCKS = 128
"""Blocks of one allocate and one commit call."""
_QUIET_S = 10.0
_log = logging.getLogger(__name__)


class ArenaStore:
    """One mapping of the node's arena and one connection to its pool."""

    def __init__(self, socket: Path, attach: AttachRequest) -> None:
        self._client = BlockingLocalClient(socket, attach)
        self._reader: ArenaReader | None = None
        self._warned_at = -_QUIET_S

    def connect(self) -> bool:
        """Attach to the pool and map its arena unless that is done; False while the pool is away."""
        reader = self._reader
        if reader is not None and reader.live and self._client.attached is not None:
            return True
        try:
            attached = self._client.connect()
            if reader is None or not reader.live:
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

    def read(self, slots: Sequence[SlotInfo], buffers: Sequence[Any]) -> int:
        """Copy blocks into `buffers`; how many leading ones are what they were when looked up."""
        reader = self._reader
        if reader is None:
            return 0
        for done, (slot, buffer) in enumerate(zip(slots, buffers, strict=True)):
            if not reader.read_into(slot.slot, slot.generation, buffer):
                return done
        return len(slots)

    def write(self, digests: Sequence[bytes], parent: bytes, fill: Callable[[list[int]], Iterable[Any]]) -> bool:
        """Store at most BATCH_BLOCKS blocks that follow `parent`. True if all of them are in the arena afterwards.

        `fill` gives the bytes of the blocks (by position) that the pool does not have yet and has room for, one by one.
        """
        if len(digests) > BATCH_BLOCKS:
            raise ValueError(f"{len(digests)} blocks in one call, at most {BATCH_BLOCKS}")
        if not self.connect():
            return False
        reader = self._reader
        try:
            reply = self._client.call(ALLOCATE, AllocateRequest(digests=b"".join(digests), parent=parent))
            wanted = [position for position, slot in enumerate(reply.slots) if slot is not None]
            slots = [slot for slot in reply.slots if slot is not None]
            if not slots:
                return not reply.refused
            if reader is None or not reader.live:
                self._client.close()  # another life of the pool gave these slots out: it takes them back
                return False
            request = _filled(reader, slots, fill(wanted))
            return self._client.call(COMMIT, request).committed == len(slots) and not reply.refused
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


def _filled(reader: ArenaReader, slots: Sequence[tuple[int, int]], contents: Iterable[Any]) -> CommitRequest:
    written: list[tuple[int, int, int, bytes]] = []
    abandoned: list[tuple[int, int]] = []
    for (slot, generation), data in zip(slots, contents, strict=True):
        fingerprint = reader.write(slot, generation, data)
        if fingerprint is None:
            abandoned.append((slot, generation))
        else:
            written.append((slot, generation, len(data), fingerprint))
    return CommitRequest(slots=written, abandon=abandoned)
