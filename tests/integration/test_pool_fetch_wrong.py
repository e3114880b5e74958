"""What a peer may do wrong in a fetch: damaged, stale, foreign and senseless answers are never taken in."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from schemas.codec import encode
from schemas.pool import LEASE_REQUEST, LeaseReply
from schemas.subjects import Subjects
from services.bus import Delivery, MemoryBus
from services.kvpool.transfer import BlockCopy, CopyJob
from tests.pool_cluster import settled, world
from tests.pool_node import BLOCK_BYTES, connect, running, settings
from tests.pool_world import context

SUBJECTS = Subjects()


@pytest.fixture(params=["shm", "mooncake"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_damaged_bytes_at_the_source_are_never_taken_in(tmp_path: Path, transport: str) -> None:
    async with world(tmp_path, "ab", transport=transport) as pools:
        chain = context("chain", 4)
        await pools["b"].write(chain)
        damaged = pools["b"].arena.find(chain[1])
        assert damaged is not None
        pools["b"].arena.view(damaged.slot)[BLOCK_BYTES - 1] ^= 1
        reply = await pools["a"].fetch("f", chain, [("b", 0, 4)])
        assert reply.blocks == 1
        assert pools["a"].holds_right_bytes(chain[:1])
        assert await pools["a"].locate(chain) == 1
        await settled(pools["a"], held=1, used=3)


async def test_a_stale_generation_is_never_taken_in(tmp_path: Path, transport: str) -> None:
    """A peer whose lease says one thing and whose arena another by the time it is read."""
    async with world(tmp_path, "ab", transport=transport, capacity_blocks=4) as pools:
        chain, other = context("chain", 2), context("other", 4)
        await pools["b"].write(chain)
        source = pools.nodes["b"].pool.store
        transports = pools.nodes["a"].pool.transports
        begin = transports[0].begin

        async def evicted_meanwhile(lease: LeaseReply, blocks: Sequence[BlockCopy]) -> CopyJob:
            for lease_id in list(source.core.leases._holds):
                source.end_lease(lease_id)
            await pools["b"].write(other)
            return await begin(lease, blocks)

        transports[0].begin = evicted_meanwhile  # type: ignore[method-assign]
        reply = await pools["a"].fetch("f", chain, [("b", 0, 2)])
        assert reply.blocks == 0
        assert reply.reason in ("stale at b", "corrupt at b")
        await settled(pools["a"], held=0, used=0)


async def test_blocks_of_another_layout_are_refused_by_name(tmp_path: Path) -> None:
    async with world(tmp_path, "a") as pools:
        chain = context("chain", 2)
        async with running(settings(tmp_path, "z", model="large"), MemoryBus(pools.hub)) as other:
            client = await connect(other.settings)
            await client.write(chain)
            reply = await pools["a"].fetch("f", chain, [("z", 0, 2)])
            assert reply.blocks == 0
            assert "z holds blocks of large" in reply.reason
            assert "here are tiny" in reply.reason
            await settled(client, held=0, used=2)
            await client.close()


async def test_a_peer_that_answers_nonsense_is_passed_over(tmp_path: Path) -> None:
    async with world(tmp_path, "ab") as pools:
        chain = context("chain", 3)
        await pools["b"].write(chain)
        bus = MemoryBus(pools.hub)
        asked = 0

        async def nonsense(request: Delivery) -> bytes:
            nonlocal asked
            asked += 1
            assert LEASE_REQUEST.decode(request.data).digests
            return b"nonsense" if asked == 1 else encode(LeaseReply(slots=[], incarnation=1, error="not today"))

        await bus.respond(SUBJECTS.pool("lease", "liar"), nonsense)
        reply = await pools["a"].fetch("f", chain, [("liar", 0, 3), ("b", 0, 3)])
        assert reply.fetched == 3
        other = context("other", 1)
        reply = await pools["a"].fetch("g", other, [("liar", 0, 1)])
        assert reply.reason == "not today"
        assert pools.nodes["a"].metric("rejected_messages_total", subject="pool.lease", reason="schema") == 1
