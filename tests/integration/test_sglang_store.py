"""SGLang's side of the arena against a real pool: blocks in, blocks out, and a pool that comes and goes."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from schemas.block_key import PLAIN
from schemas.pool import AttachRequest
from services.app import serve
from services.bus import MemoryBus, MemoryHub
from services.engine.sglang.store import BATCH_BLOCKS, ArenaStore
from services.kvpool.service import KvPool
from services.kvpool.settings import KvPoolSettings

BLOCK = 6000


class Pool:
    """A pool service that can be ended and started again over the same arena."""

    def __init__(self, folder: Path) -> None:
        self.settings = KvPoolSettings(
            node="n",
            model="m",
            block_size=16,
            block_bytes=BLOCK,
            capacity_blocks=8,
            arena=str(folder / "n.arena"),
            socket=str(folder / "n.sock"),
            transport="shm",
            log_level="error",
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        up = asyncio.Event()
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(
            serve(KvPool, self.settings, stop=self._stop, bus=MemoryBus(MemoryHub()), started=lambda _app: up.set())
        )
        await asyncio.wait_for(up.wait(), 5)

    async def stop(self) -> None:
        if self._task is not None:
            self._stop.set()
            await self._task
            self._task = None


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    pool = Pool(tmp_path)
    await pool.start()
    yield pool
    await pool.stop()


@pytest.fixture
def store(pool: Pool) -> Iterator[ArenaStore]:
    attach = AttachRequest(role="storage", model="m", block_size=16, block_bytes=BLOCK, key_version=PLAIN)
    store = ArenaStore(pool.settings.socket_path, attach)
    yield store
    store.close()


def digest(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def content(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, BLOCK, dtype=np.uint8)


def write(store: ArenaStore, numbers: list[int], parent: bytes = b"") -> bool:
    allocation = store.allocate([digest(number) for number in numbers], parent)
    if allocation is None:
        return False
    wanted = [numbers[position] for position in allocation.positions]
    filled = [store.fill(slot, 0, content(number)) for slot, number in zip(allocation.slots, wanted, strict=True)]
    return store.commit(allocation.slots, filled, BLOCK) and not allocation.refused


def read(store: ArenaStore, numbers: list[int], offset: int = 0) -> list[bytes]:
    slots = store.lookup([digest(number) for number in numbers])
    buffers = [np.zeros(BLOCK - offset, np.uint8) for _ in slots]
    return [buffer.tobytes() for buffer in buffers[: store.read(slots, buffers, offset)]]


async def test_blocks_come_back_as_they_were_written(store: ArenaStore) -> None:
    assert await asyncio.to_thread(write, store, [1, 2, 3])
    assert read(store, [1, 2, 3, 4]) == [content(number).tobytes() for number in (1, 2, 3)]
    assert read(store, [1], offset=100) == [content(1)[100:].tobytes()], "a rank reads its own part"
    assert read(store, [4, 1]) == []
    again = await asyncio.to_thread(store.allocate, [digest(3), digest(5)], digest(2))
    assert again is not None
    assert again.positions == [1], "what is there is not written twice"


async def test_a_slot_that_was_not_filled_is_given_back(store: ArenaStore) -> None:
    allocation = await asyncio.to_thread(store.allocate, [digest(1), digest(2)], b"")
    assert allocation is not None
    assert store.fill(allocation.slots[0], 0, content(1))
    assert not store.fill((allocation.slots[1][0], 99), 0, content(2)), "another life of the slot"
    assert not await asyncio.to_thread(store.commit, allocation.slots, [True, False], BLOCK)
    assert len(read(store, [1, 2])) == 1


async def test_a_full_pool_refuses_and_too_large_a_batch_is_named(store: ArenaStore) -> None:
    assert not await asyncio.to_thread(write, store, list(range(1, 20)))
    with pytest.raises(ValueError, match=f"{BATCH_BLOCKS + 1} blocks"):
        store.allocate([digest(i) for i in range(BATCH_BLOCKS + 1)], b"")


async def test_while_the_pool_is_away_nothing_is_found_and_nothing_raises(pool: Pool, store: ArenaStore) -> None:
    blocking = asyncio.to_thread
    assert await blocking(write, store, [1, 2])
    await pool.stop()
    assert read(store, [1]) == []
    assert not await blocking(write, store, [3], digest(2))

    await pool.start()
    async with asyncio.timeout(5):
        while not await blocking(store.connect):
            await asyncio.sleep(0.05)
    assert read(store, [1, 2]) == [content(1).tobytes(), content(2).tobytes()], "the new pool adopted the arena"
    assert await blocking(write, store, [3], digest(2))
    assert len(read(store, [1, 2, 3])) == 3


async def test_a_pool_of_another_model_is_not_used(pool: Pool) -> None:
    attach = AttachRequest(role="storage", model="other", block_size=16, block_bytes=BLOCK, key_version=PLAIN)
    store = ArenaStore(pool.settings.socket_path, attach)
    assert not await asyncio.to_thread(store.connect)
    assert not await asyncio.to_thread(write, store, [1])
    assert read(store, [1]) == []
