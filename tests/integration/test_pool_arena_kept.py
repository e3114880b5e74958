"""What a pool finds in the arena that was there before it, and what it leaves behind."""

import socket
from pathlib import Path

import pytest

from schemas.block_key import short_key
from schemas.kv import (
    Tier,
)
from services.arena import ArenaError
from services.bus import MemoryBus, MemoryHub
from tests.pool_listener import listening
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
