"""Blocks, contents and cores for the tests of the KV pool."""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from schemas.block_key import pack_keys
from schemas.kv import KvReference, ReferenceChange, ValueChange
from schemas.pool import AllocateRequest, CommitRequest
from services.arena import fingerprint_of
from services.kvpool.core.blocks import Effects
from services.kvpool.core.pool import PoolCore


def context(name: str, blocks: int) -> list[bytes]:
    """The digests of a context of its own."""
    return [hashlib.sha256(f"{name}/{i}".encode()).digest() for i in range(blocks)]


def content(digest: bytes, size: int) -> npt.NDArray[np.uint8]:
    """The bytes of a block: a function of its digest, different in every page."""
    seed = int.from_bytes(digest[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def store(core: PoolCore, digests: Sequence[bytes], now: float, parent: bytes = b"", owner: int = 1) -> Effects:
    """Write blocks at once; returns what the allocation did. AssertionError if one was refused."""
    reply, effects = core.allocate(AllocateRequest(digests=b"".join(digests), parent=parent), owner, now)
    assert reply.refused == 0, f"{reply.refused} blocks were refused"
    written = [(*slot, 8, fingerprint_of(d)) for d, slot in zip(digests, reply.slots, strict=True) if slot is not None]
    assert core.commit(CommitRequest(slots=written), owner, now)[0].committed == len(written)
    core.check()
    return effects


def refer(
    core: PoolCore, digests: Sequence[bytes], *, referenced: bool = True, unreachable: bool = False, seq: int = 1
) -> None:
    """What the directory would say of these blocks."""
    change = ReferenceChange(referenced=referenced, unreachable=unreachable, hashes=pack_keys(digests))
    for _ in core.refer(KvReference(node="n", incarnation=1, seq=seq, changes=[change])):
        pass
    core.check()


def worth(core: PoolCore, digests: Sequence[bytes], value: int, *, referenced: bool = True, seq: int = 1) -> None:
    """What the directory would say that these blocks are worth."""
    change = ValueChange(value=value, referenced=referenced, hashes=pack_keys(digests))
    for _ in core.refer(KvReference(node="n", incarnation=1, seq=seq, changes=[], values=[change])):
        pass
    core.check()


def evict(core: PoolCore, blocks: int) -> list[bytes]:
    """The digests that go, in order, when room for so many blocks is made in a full pool."""
    before = {slot: core.blocks.index.digest(slot) for slot in core.blocks.index.slot_of.values()}
    fresh = hashlib.sha256(repr(sorted(before)).encode()).digest()
    digests = [hashlib.sha256(fresh + bytes([i])).digest() for i in range(blocks)]
    reply, effects = core.allocate(AllocateRequest(digests=b"".join(digests)), 99, float("inf"))
    core.check()
    assert reply.refused == 0
    abandon = [slot for slot in reply.slots if slot is not None]
    core.commit(CommitRequest(slots=[], abandon=abandon), 99, float("inf"))
    return [before[slot] for slot in effects.freed]
