"""Real blocks of the timed engine, to and from the arena of its node."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from schemas.pool import AllocateRequest, CommitRequest
from services.engine.node_pool import NodePool
from services.engine.timed.content import block_content
from services.local_call import ALLOCATE, COMMIT, PoolRefused, PoolUnavailable

BLOCKS_AT_ONCE = 64
_CALL_S = 1.0


class WrongBlock(Exception):
    """A block of the arena holds other bytes than its digest stands for."""


class BlockStore(Protocol):
    """Host memory as the timed engine sees it."""

    def restore(self, digests: Sequence[bytes]) -> int:
        """Read and compare the leading run of these blocks; how many are here. WrongBlock names one that is wrong."""
        ...

    async def write(self, digests: Sequence[bytes], parent: bytes) -> int:
        """Write blocks that follow each other, `parent` (b"" for none) before the first; how many are new there."""
        ...


class ArenaBlocks:
    """The blocks of this node's pool. While the pool is away nothing is read and nothing written."""

    def __init__(self, pool: NodePool, block_bytes: int) -> None:
        self._pool, self._block_bytes = pool, block_bytes
        self._buffer = np.empty(block_bytes, np.uint8)

    def restore(self, digests: Sequence[bytes]) -> int:
        reader = self._pool.reader
        if reader is None or not digests:
            return 0
        slots = reader.lookup(b"".join(digests))
        for index, (digest, slot) in enumerate(zip(digests, slots, strict=False)):
            if not reader.read_into(slot.slot, slot.generation, self._buffer):
                return index
            if not np.array_equal(self._buffer, block_content(digest, self._block_bytes)):
                raise WrongBlock(f"slot {slot.slot} does not hold the bytes of block {digest.hex()[:16]}")
        return len(slots)

    async def write(self, digests: Sequence[bytes], parent: bytes) -> int:
        written = 0
        for start in range(0, len(digests), BLOCKS_AT_ONCE):
            part = digests[start : start + BLOCKS_AT_ONCE]
            try:
                written += await self._write(part, digests[start - 1] if start else parent)
            except (PoolUnavailable, PoolRefused):
                break
        return written

    async def _write(self, digests: Sequence[bytes], parent: bytes) -> int:
        request = AllocateRequest(digests=b"".join(digests), parent=parent)
        reply = await self._pool.client.call(ALLOCATE, request, _CALL_S)
        reader = self._pool.reader
        filled: list[tuple[int, int, int, bytes]] = []
        abandoned: list[tuple[int, int]] = []
        for digest, place in zip(digests, reply.slots, strict=True):
            if place is None:
                continue
            content = block_content(digest, self._block_bytes)
            fingerprint = reader.write(*place, content) if reader is not None else None
            if fingerprint is None:
                abandoned.append(place)
            else:
                filled.append((*place, self._block_bytes, fingerprint))
        if not (filled or abandoned):
            return 0
        done = await self._pool.client.call(COMMIT, CommitRequest(slots=filled, abandon=abandoned), _CALL_S)
        return done.committed


class NoBlocks:
    """A node without host memory."""

    def restore(self, digests: Sequence[bytes]) -> int:
        return 0

    async def write(self, digests: Sequence[bytes], parent: bytes) -> int:
        return 0
