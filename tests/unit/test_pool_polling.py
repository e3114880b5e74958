"""The polling thread over a transfer engine that does what Mooncake's cannot be made to do on demand."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from schemas.pool import SlotInfo
from services.arena import ArenaIdentity, fingerprint_of
from services.kvpool.arena import Arena
from services.kvpool.core.blocks import Effects
from services.kvpool.transfer import BlockCopy, CopyJob, Outcome
from services.kvpool.transfer.polling import IN_FLIGHT, MERGED_BYTES, Poller
from tests.pool_world import content, context

BASE = 1 << 40


class Engine:
    """Transfers end when the test says so; `ends` maps the number of an entry to a status and what it writes."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.entries: list[tuple[int, int, int]] = []
        self.status: dict[int, int] = {}
        self.most_in_flight = 0
        self.refuses = False
        self.breaks = False
        self.finish: Callable[[int], int] = lambda _: 1
        self.open = threading.Event()
        self.open.set()

    def batch_transfer_async_read(self, session: str, buffers: list[int], peers: list[int], lengths: list[int]) -> int:
        assert session == "peer:1"
        assert len(buffers) == len(peers) == len(lengths) == 1
        if self.refuses:
            return 0
        self.entries.append((buffers[0], peers[0], lengths[0]))
        batch = len(self.entries)
        self.status[batch] = 0
        self.most_in_flight = max(self.most_in_flight, sum(status == 0 for status in self.status.values()))
        return batch

    def transfer_check_status(self, batch: int) -> int:
        if self.breaks:
            raise RuntimeError("the engine broke")
        if self.open.is_set() and self.status[batch] == 0:
            self.status[batch] = self.finish(batch)
        return self.status[batch]


class World:
    def __init__(self, folder: Path, block_bytes: int) -> None:
        identity = ArenaIdentity(model="tiny", block_size=16, block_bytes=block_bytes, key_version="x")
        self.arena, _ = Arena.open(folder / "arena", identity, 64, 1)
        self.arena.go_live([], Effects())
        self.engine = Engine(self.arena)
        self.poller = Poller(self.engine, self.arena)
        self._block_bytes = block_bytes

    def job(self, pairs: list[tuple[int, int]]) -> CopyJob:
        """Copy from these slots to these; the bytes are there already, as if the network had brought them."""
        blocks = []
        for digest, (source, target) in zip(context("d", len(pairs)), pairs, strict=True):
            data = content(digest, self._block_bytes)
            self.arena.view(target)[: self._block_bytes] = data
            info = SlotInfo(slot=source, generation=1, length=self._block_bytes, fingerprint=fingerprint_of(data))
            blocks.append(BlockCopy(info, digest, target))
        job = CopyJob(blocks, asyncio.get_running_loop())
        self.poller.submit(job, "peer:1", BASE)
        return job


@pytest.fixture
async def worlds(tmp_path: Path) -> AsyncIterator[Callable[[int], World]]:
    made: list[World] = []

    def make(block_bytes: int) -> World:
        made.append(World(tmp_path, block_bytes))
        return made[-1]

    yield make
    for world in made:
        world.poller.close()


async def test_neighbours_travel_together_up_to_a_size(worlds: Callable[[int], World]) -> None:
    world = worlds(256 << 10)
    job = world.job([(10 + i, 20 + i) for i in range(6)] + [(40, 50), (42, 51)])
    await job.done
    assert set(job.outcomes) == {Outcome.ARRIVED}
    sizes = [size >> 10 for _, _, size in world.engine.entries]
    assert sizes == [1024, 512, 256, 256]
    assert MERGED_BYTES == 1 << 20
    data, slot_bytes = world.arena.data_address, world.arena.layout.slot_bytes
    assert world.engine.entries[1][:2] == (data + 24 * slot_bytes, BASE + 14 * slot_bytes)


async def test_slots_with_padding_do_not_travel_together(worlds: Callable[[int], World]) -> None:
    world = worlds(5000)
    job = world.job([(1, 1), (2, 2)])
    await job.done
    assert [size for _, _, size in world.engine.entries] == [5000, 5000]
    assert job.outcomes == [Outcome.ARRIVED] * 2


async def test_few_entries_are_in_flight(worlds: Callable[[int], World]) -> None:
    world = worlds(5000)
    job = world.job([(i, i) for i in range(60)])
    await job.done
    assert job.outcomes == [Outcome.ARRIVED] * 60
    assert 0 < world.engine.most_in_flight <= IN_FLIGHT


async def test_wrong_bytes_are_corrupt(worlds: Callable[[int], World]) -> None:
    world = worlds(5000)
    world.engine.open.clear()
    job = world.job([(0, 0), (1, 1)])
    world.arena.view(1)[4999] ^= 1
    world.engine.open.set()
    await job.done
    assert job.outcomes == [Outcome.ARRIVED, Outcome.CORRUPT]


async def test_a_failed_entry_ends_the_copy(worlds: Callable[[int], World]) -> None:
    world = worlds(5000)
    world.engine.finish = lambda batch: -1 if batch == 2 else 1
    job = world.job([(i, i) for i in range(50)])
    await job.done
    assert job.outcomes[1] is Outcome.FAILED
    assert job.outcomes[-1] is Outcome.SKIPPED
    assert Outcome.PENDING not in job.outcomes


async def test_a_timed_out_entry_leaves_its_slot_unsettled(worlds: Callable[[int], World]) -> None:
    world = worlds(5000)
    world.engine.finish = lambda batch: -2 if batch == 1 else 1
    job = world.job([(0, 0), (1, 1)])
    await job.done
    assert job.outcomes == [Outcome.UNSETTLED, Outcome.ARRIVED]


async def test_an_entry_that_is_not_taken_fails(worlds: Callable[[int], World]) -> None:
    world = worlds(5000)
    world.engine.refuses = True
    job = world.job([(0, 0), (1, 1)])
    await job.done
    assert job.outcomes == [Outcome.FAILED, Outcome.SKIPPED]


async def test_a_stopped_copy_begins_nothing_more_and_ends_with_what_was_begun(worlds: Callable[[int], World]) -> None:
    world = worlds(5000)
    world.engine.open.clear()
    job = world.job([(i, i) for i in range(50)])
    async with asyncio.timeout(5):
        while len(world.engine.entries) < IN_FLIGHT:
            await asyncio.sleep(0.001)
    job.stop()
    await asyncio.sleep(0.02)
    assert not job.done.done(), "its slots may still be written"
    world.engine.open.set()
    await job.done
    assert job.outcomes == [Outcome.ARRIVED] * IN_FLIGHT + [Outcome.SKIPPED] * (50 - IN_FLIGHT)


async def test_one_frozen_peer_holds_up_nobody_else(worlds: Callable[[int], World]) -> None:
    world = worlds(5000)
    world.engine.finish = lambda batch: 0 if batch == 1 else 1
    frozen = world.job([(0, 0)])
    async with asyncio.timeout(5):
        await world.job([(1, 1), (2, 2)]).done
    assert not frozen.done.done()
    frozen.stop()
    world.poller.close()
    await frozen.done
    assert frozen.outcomes == [Outcome.UNSETTLED]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_broken_engine_is_no_silent_hang(worlds: Callable[[int], World]) -> None:
    world = worlds(5000)
    world.engine.breaks = True
    job = world.job([(0, 0)])
    with pytest.raises(RuntimeError, match="the engine broke"):
        await job.done
    assert job.outcomes == [Outcome.UNSETTLED]
