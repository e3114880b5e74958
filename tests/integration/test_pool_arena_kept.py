"""What a pool finds in the arena that was there before it, and what it leaves behind."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from schemas.block_key import pack_keys, short_key
from schemas.codec import encode
from schemas.directory import MATCH_REPLY, MatchQuery
from schemas.kv import BlockMedia, Tier
from schemas.pool import AllocateRequest
from services.app import serve
from services.arena import ArenaError
from services.bus import MemoryBus, MemoryHub
from services.directory.service import DirectoryService
from services.directory.settings import DirectorySettings
from services.kvpool.settings import KvPoolSettings
from services.local_call import ALLOCATE
from tests.pool_listener import SUBJECTS, listening
from tests.pool_node import connect, running, settings
from tests.pool_world import context


@pytest.fixture
async def hub() -> MemoryHub:
    return MemoryHub()


async def test_a_restarted_pool_offers_what_it_held_and_drops_what_was_damaged(tmp_path: Path, hub: MemoryHub) -> None:
    of = settings(tmp_path, "a")
    chain = context("chain", 5)
    async with running(of, MemoryBus(hub)):
        client = await connect(of)
        await client.write(chain)
        found = client.arena.find(chain[3])
        assert found is not None
        client.arena.view(found.slot)[100] ^= 1
        await client.close()
    listener = await listening(MemoryBus(hub), "a")
    async with running(of, MemoryBus(hub)) as node:
        await listener.held(Tier.L2, 5)
        client = await connect(of)
        assert node.metric("blocks", state="unverified") == 5
        assert (await client.fetch("f", chain)).blocks == 3
        assert client.holds_right_bytes(chain[:3])
        assert await listener.held(Tier.L2, 4) == {short_key(digest) for digest in [*chain[:3], chain[4]]}
        assert node.metric("rejected_fingerprints_total") == 1
        assert await client.write(chain[3:], parent=chain[2]) == 1
        assert client.holds_right_bytes(chain)
        await client.close()


async def test_a_pool_refuses_an_arena_of_another_model(tmp_path: Path, hub: MemoryHub) -> None:
    async with running(settings(tmp_path, "a"), MemoryBus(hub)):
        pass
    with pytest.raises(ExceptionGroup) as raised:
        async with running(settings(tmp_path, "a", model="large"), MemoryBus(hub)):
            pass
    (error,) = raised.value.exceptions
    assert isinstance(error, ArenaError)
    assert "holds blocks of tiny" in str(error)
    assert "this pool is for large" in str(error)
    async with running(settings(tmp_path, "a", model="large", reset=True), MemoryBus(hub)) as node:
        assert node.metric("blocks", state="used") == 0


async def test_what_a_pool_leaves_behind(tmp_path: Path, hub: MemoryHub) -> None:
    of = settings(tmp_path, "a", keep_arena=False)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(of.socket)
    async with running(of, MemoryBus(hub)):
        assert of.arena_path.exists()
        assert of.socket_path.stat().st_mode & 0o777 == 0o600
    assert not of.arena_path.exists()
    assert not of.socket_path.exists()


@asynccontextmanager
async def both(of: KvPoolSettings, hub: MemoryHub) -> AsyncIterator[None]:
    """A pool, and a directory that remembers nothing of an earlier life; what they leave hears and answers nothing."""
    stop, started = asyncio.Event(), asyncio.Event()
    given = DirectorySettings(see_after_s=0.05, debug_checks=True, log_level="error")
    bus, pools = MemoryBus(hub), MemoryBus(hub)
    task = asyncio.create_task(serve(DirectoryService, given, stop=stop, bus=bus, started=lambda _: started.set()))
    await started.wait()
    try:
        async with running(of, pools):
            yield
    finally:
        stop.set()
        await task
        await bus.close()
        await pools.close()


async def found(bus: MemoryBus, chain: list[bytes], *marks: BlockMedia) -> int:
    """How many blocks of a prompt with these media the cluster supplies."""
    query = MatchQuery(request="r", hashes=pack_keys(chain), media=list(marks))
    return MATCH_REPLY.decode(await bus.request(SUBJECTS.query_directory("match"), encode(query), 5.0)).blocks


async def becomes(bus: MemoryBus, blocks: int, chain: list[bytes], *marks: BlockMedia) -> None:
    async with asyncio.timeout(20):
        while await found(bus, chain, *marks) != blocks:
            await asyncio.sleep(0.01)


async def test_which_blocks_show_what_outlives_a_pool_and_a_directory_that_start_anew_together(
    tmp_path: Path, hub: MemoryHub
) -> None:
    of, chain, bus = settings(tmp_path, "a"), context("pictures", 6), MemoryBus(hub)
    early, late = [BlockMedia(1, b"c" * 32), BlockMedia(2, b"c" * 32 + b"d" * 32)], [BlockMedia(4, b"e" * 32)]
    crowded = BlockMedia(5, b"f" * 96)
    async with both(of, hub):
        client = await connect(of)
        await client.fetch("f", chain, media=early)
        slots = (await client.client.call(ALLOCATE, AllocateRequest(digests=b"".join(chain)))).slots
        fetching = asyncio.create_task(client.fetch("g", chain, media=[*late, crowded]))
        await client.fill(chain, slots)
        await fetching
        await becomes(bus, 6, chain, *early, *late, crowded)
        await client.close()
    async with both(of, hub):
        await becomes(bus, 6, chain, *early, *late)
        assert await found(bus, chain, BlockMedia(1, b"d" * 32)) == 1, "another picture"
        assert await found(bus, chain, BlockMedia(3, b"c" * 32)) == 3, "a block of text"
        assert await found(bus, chain, crowded) == 5, "more media in one block than are kept"


async def test_what_a_slot_showed_goes_with_its_block(tmp_path: Path, hub: MemoryHub) -> None:
    of, bus = settings(tmp_path, "a", capacity_blocks=6), MemoryBus(hub)
    pictures, text = context("pictures", 6), context("text", 6)
    async with both(of, hub):
        client = await connect(of)
        await client.fetch("f", pictures, media=[BlockMedia(number, b"c" * 32) for number in range(6)])
        await client.write(pictures)
        await client.release("f")
        assert await client.write(text) == 6
        await client.close()
    async with both(of, hub):
        await becomes(bus, 6, text)
        assert await found(bus, text, BlockMedia(1, b"c" * 32)) == 1
