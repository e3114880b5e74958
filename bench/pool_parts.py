"""What the pool's own work costs, apart from moving bytes: look-ups, allocation, eviction, memory, snapshots.

Work of one process is given in CPU time: it says the same on a machine that has other things to do.
"""

import asyncio
import contextlib
import hashlib
import statistics
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np

from schemas.codec import encode
from schemas.pool import DIGEST_BYTES, AllocateRequest, CommitRequest
from services.arena import ArenaReader, fingerprint_of
from services.bus import MemoryBus, MemoryHub
from services.kvpool.core.pool import PoolCore
from services.kvpool.publish import MAX_MESSAGE_BYTES, PART_BLOCKS
from services.local_call import ALLOCATE, COMMIT
from tests.pool_node import PoolClient, connect, running, settings

BATCH = 128


def digests(name: str, blocks: int) -> bytes:
    """Packed digests of a context of its own."""
    rng = np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))
    return rng.bytes(DIGEST_BYTES * blocks)


def _median_s(action: Callable[[int], None], times: int) -> float:
    taken = []
    for turn in range(times):
        began = time.process_time()
        action(turn)
        taken.append(time.process_time() - began)
    return statistics.median(taken)


def _store(core: PoolCore, packed: bytes, now: float) -> None:
    for start in range(0, len(packed), BATCH * DIGEST_BYTES):
        part = packed[start : start + BATCH * DIGEST_BYTES]
        parent = packed[start - DIGEST_BYTES : start] if start else b""
        reply, _ = core.allocate(AllocateRequest(digests=part, parent=parent), 1, now)
        written = [(*slot, 8, bytes(16)) for slot in reply.slots if slot is not None]
        core.commit(CommitRequest(slots=written), 1, now)
    core.log.take(1 << 20)


def core_figures(slots: int, turnover: int) -> dict[str, float]:
    """Bytes a slot takes in the core; evictions per second, with the allocation and commit that caused each."""
    contexts = [digests(f"context {i}", 1000) for i in range((slots + turnover) // 1000)]
    tracemalloc.start()
    core = PoolCore("bench", 1, slots)
    filled = slots // 1000
    for now, packed in enumerate(contexts[:filled]):
        _store(core, packed, float(now))
    bytes_per_slot = tracemalloc.get_traced_memory()[0] / slots
    tracemalloc.stop()
    began = time.process_time()
    for now, packed in enumerate(contexts[filled:], filled):
        _store(core, packed, float(now))
    took = time.process_time() - began
    evicted = core.counters.evicted_unreferenced
    return {"bytes_per_slot": bytes_per_slot, "evictions_per_s": evicted / took}


def snapshot_figures(blocks: int) -> dict[str, float]:
    """Taking a snapshot of `blocks` blocks: the one stop for the copies, the longest part, all parts."""
    core = PoolCore("bench", 1, blocks)
    for i in range(blocks // 1000):
        _store(core, digests(f"context {i}", 1000), float(i))
    began = time.process_time()
    snapshot = core.freeze("bench")
    frozen = time.process_time()
    longest, cursor = 0.0, 0
    while True:
        start = time.process_time()
        part = snapshot.part(cursor, PART_BLOCKS, MAX_MESSAGE_BYTES)
        assert part is not None
        encode(part)
        longest = max(longest, time.process_time() - start)
        if part.next_cursor is None:
            break
        cursor = part.next_cursor
    return {
        "snapshot_freeze_ms": (frozen - began) * 1e3,
        "snapshot_part_max_ms": longest * 1e3,
        "snapshot_s": time.process_time() - began,
    }


async def write_128_ms(client: PoolClient, turns: int) -> tuple[float, float]:
    """Allocate and commit of 128 blocks over the socket, without their bytes: median of each, in ms."""
    print_ = fingerprint_of(b"")
    allocate, commit = [], []
    for turn in range(turns):
        request = AllocateRequest(digests=digests(f"written {turn}", BATCH))
        began = time.perf_counter()
        reply = await client.client.call(ALLOCATE, request)
        allocated = time.perf_counter()
        written = [(*slot, 8, print_) for slot in reply.slots if slot is not None]
        await client.client.call(COMMIT, CommitRequest(slots=written))
        allocate.append(allocated - began)
        commit.append(time.perf_counter() - allocated)
    return statistics.median(allocate) * 1e3, statistics.median(commit) * 1e3


def lookup_us(reader: ArenaReader, packed: bytes, turns: int) -> float:
    """Looking up 128 blocks in the mapped index: median in us of CPU."""
    assert len(reader.lookup(packed)) == len(packed) // DIGEST_BYTES
    return _median_s(lambda _: void(reader.lookup(packed)), turns) * 1e6


def void(_: object) -> None:
    """Drop a result."""


async def loop_gap_ms(folder: Path, blocks: int) -> float:
    """The longest stretch of CPU the loop of a pool was not free for others during a fetch of `blocks` blocks."""
    hub, gaps = MemoryHub(), [0.0]
    given = {"block_bytes": 64 << 10, "capacity_blocks": blocks + 64, "debug_checks": False}
    async with contextlib.AsyncExitStack() as stack:
        here, there = (settings(folder, node, **given) for node in ("here", "there"))
        for of in (here, there):
            await stack.enter_async_context(running(of, MemoryBus(hub)))
        asker, source = await connect(here), await connect(there)
        packed = digests("gap", blocks)
        chain = [packed[at : at + DIGEST_BYTES] for at in range(0, len(packed), DIGEST_BYTES)]
        for at in range(0, blocks, BATCH):
            await source.write(chain[at : at + BATCH], parent=chain[at - 1] if at else b"")

        async def probe() -> None:
            while True:
                began = time.thread_time()
                await asyncio.sleep(0)
                gaps.append(time.thread_time() - began)

        probing = asyncio.create_task(probe())
        reply = await asker.fetch("gap", chain, [("there", 0, blocks)], deadline_s=60.0)
        probing.cancel()
        assert reply.fetched == blocks, reply
        for client in (asker, source):
            await client.close()
    return max(gaps) * 1e3
