"""Peers on the same host: map their arena and copy. No lease can be older than its arena's incarnation."""

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
from xxhash import xxh3_128

from schemas.pool import LeaseReply
from services.arena import ArenaError, ArenaReader
from services.kvpool.arena import Arena
from services.kvpool.transfer.types import BlockCopy, CopyJob, Outcome, TransportError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
INLINE_BYTES = 256 << 10
"""Up to this size a copy is quicker than the way to a thread and back."""
CHUNK_BYTES = 256 << 10
THREADS = min(4, os.cpu_count() or 1)


def host_id() -> str:
    """Equal for pools that may see each other's files: the running kernel. The arena's own page 0 is the proof."""
    return _BOOT_ID.read_text().strip()


class ShmTransport:
    """Copies through a mapping of the peer's arena; large copies run in threads that do not hold the GIL."""

    name = "shm"

    def __init__(self, arena: Arena, host: str) -> None:
        self._arena, self._host = arena, host
        self._readers: dict[str, ArenaReader] = {}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="shm-copy")

    def reaches(self, lease: LeaseReply) -> bool:
        return bool(lease.arena) and lease.host == self._host and self._mapped(lease) is not None

    def _mapped(self, lease: LeaseReply) -> ArenaReader | None:
        """The peer's arena as of the lease's incarnation; None if this path shows another one, or none."""
        reader = self._readers.get(lease.arena)
        if reader is None or not reader.live or reader.layout.incarnation != lease.incarnation:
            self._readers.pop(lease.arena, None)
            try:
                reader = ArenaReader(Path(lease.arena))
            except (ArenaError, OSError):
                return None
            if reader.layout.incarnation != lease.incarnation:
                return None
            self._readers[lease.arena] = reader
        return reader

    def forget_dead(self) -> None:
        """Let go of arenas that their pools have left: a mapping keeps their memory from being freed."""
        for path, reader in list(self._readers.items()):
            if not reader.live or not Path(path).exists():
                del self._readers[path]

    async def begin(self, lease: LeaseReply, blocks: Sequence[BlockCopy]) -> CopyJob:
        reader = self._mapped(lease)
        if reader is None:
            raise TransportError(f"the arena {lease.arena} is not that of incarnation {lease.incarnation}")
        loop = asyncio.get_running_loop()
        job = CopyJob(blocks, loop)
        if sum(block.source.length for block in blocks) <= INLINE_BYTES:
            self._copy(reader, job, 0, 1)
            job.finish()
        else:
            parts = [
                loop.run_in_executor(self._threads, self._copy, reader, job, first, THREADS)
                for first in range(min(THREADS, len(blocks)))
            ]
            asyncio.gather(*parts, return_exceptions=True).add_done_callback(
                lambda ended: job.finish(next((e for e in ended.result() if e is not None), None))
            )
        return job

    def _copy(self, reader: ArenaReader, job: CopyJob, first: int, step: int) -> None:
        for i in range(first, len(job.blocks), step):
            if job.stopped:
                return
            job.outcomes[i] = self._copy_block(reader, job.blocks[i])

    def _copy_block(self, reader: ArenaReader, block: BlockCopy) -> Outcome:
        """Copy in chunks, fingerprint each while it is in the cache; check the peer's header before and after."""
        slot, generation, length, fingerprint = msgspec.structs.astuple(block.source)
        if length > self._arena.layout.slot_bytes or slot >= reader.layout.slots:
            return Outcome.STALE
        if not reader.current(slot, generation, block.digest):
            return Outcome.STALE
        source, target = reader.view(slot), self._arena.view(block.slot)
        hashed = xxh3_128()
        for start in range(0, length, CHUNK_BYTES):
            end = min(start + CHUNK_BYTES, length)
            np.copyto(target[start:end], source[start:end])
            hashed.update(target[start:end].data)
        if not reader.current(slot, generation, block.digest):
            return Outcome.STALE
        return Outcome.ARRIVED if hashed.digest() == fingerprint else Outcome.CORRUPT

    async def close(self) -> None:
        await asyncio.to_thread(self._threads.shutdown)
        self._readers.clear()
