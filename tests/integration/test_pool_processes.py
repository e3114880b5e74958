"""Pools and clients that are killed, frozen and raced: nothing leaks, nothing hangs, no wrong byte is read."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from schemas.kv import KV_LOCATION
from schemas.subjects import Subjects
from services.arena import ArenaReader
from services.bus import Delivery, MemoryBus, MemoryHub
from services.kvpool.settings import KvPoolSettings
from services.local_call import PoolUnavailable
from tests.conftest import Connect
from tests.integration.pool_writer import DIGESTS, SIZE
from tests.pool_node import PoolClient, PoolProcess, connect, running, settings
from tests.pool_world import content, context

MEGABYTE = 1 << 20
Start = Callable[[KvPoolSettings], Awaitable[PoolProcess]]
Script = Callable[..., Awaitable[asyncio.subprocess.Process]]


@pytest.fixture
async def pool(nats_url: str) -> AsyncIterator[Start]:
    """Starts pools as processes on the test's broker; kills what still runs after the test."""
    started: list[PoolProcess] = []

    async def start(of: KvPoolSettings) -> PoolProcess:
        started.append(await PoolProcess.start(of, nats_url))
        return started[-1]

    yield start
    for process in started:
        process.thaw()
        await process.kill()
        process.settings.arena_path.unlink(missing_ok=True)


@pytest.fixture
async def script() -> AsyncIterator[Script]:
    """Runs a module of the tests and waits for its first line; kills it after the test."""
    started: list[asyncio.subprocess.Process] = []

    async def start(module: str, *arguments: object) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *map(str, arguments), stdout=asyncio.subprocess.PIPE
        )
        started.append(process)
        assert process.stdout is not None
        async with asyncio.timeout(20):
            assert await process.stdout.readline()
        return process

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def large(folder: Path, node: str, **fields: Any) -> KvPoolSettings:
    """A pool of megabyte blocks."""
    given = {"block_bytes": MEGABYTE, "capacity_blocks": 200, "debug_checks": False}
    return settings(folder, node, **given | fields)


async def fill(client: PoolClient, chain: Sequence[bytes]) -> None:
    for start in range(0, len(chain), 50):
        await client.write(chain[start : start + 50], parent=chain[start - 1] if start else b"")


async def until(condition: Callable[[], Awaitable[bool]], within_s: float = 20.0) -> None:
    async with asyncio.timeout(within_s):
        while not await condition():
            await asyncio.sleep(0.01)


async def test_killing_a_client_frees_its_allocations_and_pins(tmp_path: Path, pool: Start, script: Script) -> None:
    of = settings(tmp_path, "a")
    await pool(of)
    client = await connect(of)
    holder = await script("tests.integration.pool_holder", of.socket_path, of.model, of.block_bytes)
    status = await client.status()
    assert (status.used_blocks, status.pinned_blocks) == (7, 3)
    holder.kill()

    async def only_what_was_committed_is_left() -> bool:
        status = await client.status()
        return (status.used_blocks, status.pinned_blocks) == (3, 0)

    await until(only_what_was_committed_is_left, within_s=5.0)
    await client.close()


async def test_slots_of_a_client_that_lives_on_wait_for_its_end(tmp_path: Path, script: Script) -> None:
    of = settings(tmp_path, "a")
    async with running(of, MemoryBus(MemoryHub())) as node:
        client = await connect(of)
        holder = await script("tests.integration.pool_holder", of.socket_path, of.model, of.block_bytes, "close")

        async def pins_are_gone() -> bool:
            return (await client.status()).pinned_blocks == 0

        await until(pins_are_gone)
        assert node.metric("blocks", state="aside") == 4
        assert await client.locate(context("held", 4)) == 0
        holder.kill()

        async def slots_are_back() -> bool:
            return (await client.status()).used_blocks == 3

        await until(slots_are_back, within_s=5.0)
        await client.close()


@pytest.mark.parametrize("transport", ["shm", "mooncake"])
async def test_a_frozen_peer_costs_a_fetch_its_deadline_and_is_asked_again_next_time(
    tmp_path: Path, pool: Start, nats_url: str, nats_connect: Connect, transport: str
) -> None:
    theirs, ours = (large(tmp_path, name, transport=transport) for name in "ba")
    peer = await pool(theirs)
    there = await connect(theirs)
    chain = context("chain", 20)
    await fill(there, chain)
    async with running(ours, await nats_connect(nats_url)) as node:
        here = await connect(ours)
        assert (await here.fetch("warm", chain[:2], [("b", 0, 20)])).fetched == 2
        peer.freeze()
        loop = asyncio.get_running_loop()
        began = loop.time()
        reply = await here.fetch("f", chain, [("b", 0, 20)], deadline_s=0.5)
        assert loop.time() - began < 1.0
        assert (reply.blocks, reply.reason) == (2, "deadline")
        assert node.metric("deadline_exceeded_total") == 1
        peer.thaw()
        reply = await here.fetch("g", chain, [("b", 0, 20)])
        assert reply.blocks == 20
        assert here.holds_right_bytes(chain)
        await here.close()
    await there.close()


async def test_a_peer_frozen_in_the_middle_of_a_transfer(
    tmp_path: Path, pool: Start, nats_url: str, nats_connect: Connect
) -> None:
    theirs, ours = (large(tmp_path, name, transport="mooncake") for name in "ba")
    peer = await pool(theirs)
    there = await connect(theirs)
    chain = context("chain", 150)
    await fill(there, chain)
    async with running(ours, await nats_connect(nats_url)) as node:
        here = await connect(ours)
        assert (await here.fetch("warm", chain[:1], [("b", 0, 150)])).fetched == 1
        fetching = asyncio.create_task(here.fetch("f", chain, [("b", 0, 150)], deadline_s=1.0))

        async def some_have_come() -> bool:
            return await here.locate(chain) > 1

        await until(some_have_come)
        peer.freeze()
        reply = await fetching
        assert reply.blocks < 150
        assert reply.took_s < 1.5
        assert here.holds_right_bytes(chain[: reply.blocks])
        in_the_air = node.metric("blocks", state="aside")
        recomputed = context("recomputed", 60)
        await fill(here, recomputed)
        peer.thaw()

        async def nothing_is_in_the_air() -> bool:
            return node.metric("blocks", state="aside") == 0

        await until(nothing_is_in_the_air)
        assert in_the_air > 0
        assert here.holds_right_bytes(recomputed), "late bytes went where nobody reads"
        await here.release("f")
        assert (await here.fetch("g", chain[:100], [("b", 0, 150)])).blocks == 100
        assert here.holds_right_bytes(chain[:100])
        await here.close()
    await there.close()


@pytest.mark.parametrize("transport", ["shm", "mooncake"])
async def test_a_peer_killed_in_the_middle_of_a_fetch(
    tmp_path: Path, pool: Start, nats_url: str, nats_connect: Connect, transport: str
) -> None:
    theirs, ours = (large(tmp_path, name, transport=transport) for name in "ba")
    peer = await pool(theirs)
    there = await connect(theirs)
    chain = context("chain", 150)
    await fill(there, chain)
    await there.close()
    async with running(ours, await nats_connect(nats_url)):
        here = await connect(ours)
        fetching = asyncio.create_task(here.fetch("f", chain, [("b", 0, 150)], deadline_s=20.0))

        async def some_have_come() -> bool:
            return await here.locate(chain) > 0

        await until(some_have_come)
        await peer.kill()
        async with asyncio.timeout(10):
            reply = await fetching
        assert here.holds_right_bytes(chain[: reply.blocks])
        assert (await here.status()).pinned_blocks == reply.blocks
        await pool(theirs)
        again = await connect(theirs)
        assert await again.locate(chain) == 150, "the restarted peer has adopted its arena"
        reply = await here.fetch("f", chain, [("b", 0, 150)], deadline_s=20.0)
        assert reply.blocks == 150
        assert here.holds_right_bytes(chain)
        await here.close()
        await again.close()


async def test_the_own_pool_killed_in_the_middle_of_a_fetch(
    tmp_path: Path, pool: Start, nats_url: str, nats_connect: Connect
) -> None:
    theirs, ours = (large(tmp_path, name, transport="mooncake", aside_s=0.2) for name in "ba")
    await pool(theirs)
    there = await connect(theirs)
    chain = context("chain", 150)
    await fill(there, chain)
    own = await pool(ours)
    here = await connect(ours)
    fetching = asyncio.create_task(here.fetch("f", chain, [("b", 0, 150)], deadline_s=20.0))

    async def some_have_come() -> bool:
        return await here.locate(chain) > 0

    await until(some_have_come)
    await own.kill()
    with pytest.raises(PoolUnavailable):
        await fetching
    seen: list[int] = []

    async def on_location(delivery: Delivery) -> None:
        seen.append(KV_LOCATION.decode(delivery.data).seq)

    await (await nats_connect(nats_url)).subscribe(Subjects().kv_location("a"), on_location)
    await pool(ours)
    await here.client.wait_attached(20.0)
    adopted = await here.locate(chain)
    assert adopted > 0
    assert here.holds_right_bytes(chain[:adopted])

    reply = await here.fetch("g", chain, [("b", 0, 150)], deadline_s=20.0)
    assert reply.blocks == 150
    assert here.holds_right_bytes(chain)

    async def torn_slots_are_free() -> bool:
        return (await here.status()).used_blocks == 150

    await until(torn_slots_are_free)
    assert seen[0] == 1
    await here.close()
    await there.close()


async def test_a_pool_that_is_told_to_stop_ends_well_and_leaves_its_arena_to_the_next(
    tmp_path: Path, pool: Start
) -> None:
    of = settings(tmp_path, "a", transport="mooncake")
    chain = context("chain", 3)
    for blocks in (0, 3):
        process = await pool(of)
        client = await connect(of)
        assert await client.locate(chain) == blocks
        await client.write(chain)
        await client.close()
        process.process.terminate()
        async with asyncio.timeout(20):
            assert await process.process.wait() == 0
        assert not of.socket_path.exists()


async def test_reads_that_race_a_writer_are_right_or_refused(tmp_path: Path, script: Script) -> None:
    path = tmp_path / "raced"
    writer = await script("tests.integration.pool_writer", path, 2.0)
    digests = context("raced", DIGESTS)
    blocks = {digest: content(digest, SIZE).tobytes() for digest in digests}

    def race() -> tuple[int, int]:
        reader = ArenaReader(path)
        buffer = bytearray(SIZE)
        right = refused = 0
        while writer.returncode is None:
            for digest in digests:
                found = reader.find(digest)
                if found is None:
                    continue
                if reader.read_into(found.slot, found.generation, buffer):
                    assert buffer == blocks[digest], "a torn or foreign block was read"
                    right += 1
                else:
                    refused += 1
            for info in reader.lookup(b"".join(digests[:4])):
                assert info.length == SIZE
        return right, refused

    waiting = asyncio.create_task(writer.wait())
    right, refused = await asyncio.to_thread(race)
    await waiting
    assert writer.returncode == 0
    assert right > 100
    assert refused > 0, "the race was never close"
