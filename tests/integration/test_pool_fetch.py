"""Fetches between pools: from one peer or several, torn, stale, late, at once; over shared memory and Mooncake."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from schemas.pool import LeaseReply
from schemas.subjects import Subjects
from services.kvpool.fetch import _Fetch
from services.kvpool.transfer import BlockCopy, CopyJob, Outcome
from tests.pool_cluster import settled, world
from tests.pool_node import BLOCK_BYTES, Node, connect
from tests.pool_world import content, context

SUBJECTS = Subjects()
Cluster = Callable[..., Any]


@pytest.fixture(params=["shm", "mooncake"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_a_prefix_is_brought_from_a_peer_and_pinned(tmp_path: Path, transport: str) -> None:
    async with world(tmp_path, "ab", transport=transport) as pools:
        chain = context("chain", 9)
        await pools["b"].write(chain)
        reply = await pools["a"].fetch("f", chain, [("b", 0, 9)])
        assert (reply.blocks, reply.fetched, reply.bytes) == (9, 9, 9 * BLOCK_BYTES)
        assert (reply.transport, reply.reason) == (transport, "")
        assert pools["a"].holds_right_bytes(chain)
        await settled(pools["a"], held=9, used=9)
        await settled(pools["b"], held=0, used=9)
        await pools["a"].release("f")
        await settled(pools["a"], held=0, used=9)
        assert pools.nodes["a"].metric("fetched_bytes_total", transport=transport) == 9 * BLOCK_BYTES
        again = await pools["a"].fetch("g", chain, [("b", 0, 9)])
        assert (again.blocks, again.fetched) == (9, 0)


async def test_pieces_of_one_prefix_come_from_several_nodes(tmp_path: Path, transport: str) -> None:
    async with world(tmp_path, "abc", transport=transport) as pools:
        chain = context("chain", 12)
        await pools["b"].write(chain[:5])
        await pools["c"].write(chain[4:9], parent=chain[3])
        await pools["a"].write(chain[2:4], parent=chain[1])
        sources = [("b", 0, 5), ("c", 4, 12), ("a", 2, 4)]
        reply = await pools["a"].fetch("f", chain, sources)
        assert (reply.blocks, reply.fetched) == (9, 7)
        assert "c does not have" in reply.reason
        assert pools["a"].holds_right_bytes(chain[:9])
        await settled(pools["a"], held=9, used=9)


async def test_a_block_that_one_source_lost_comes_from_the_next(tmp_path: Path) -> None:
    async with world(tmp_path, "abc") as pools:
        chain = context("chain", 6)
        await pools["b"].write(chain[:3])
        await pools["c"].write(chain)
        reply = await pools["a"].fetch("f", chain, [("b", 0, 6), ("nowhere", 0, 6), ("c", 0, 6)])
        assert (reply.blocks, reply.fetched) == (6, 6)
        assert pools["a"].holds_right_bytes(chain)


async def test_without_a_source_what_is_here_is_pinned(tmp_path: Path) -> None:
    async with world(tmp_path, "a") as pools:
        chain = context("chain", 4)
        await pools["a"].write([*chain[:2]])
        await pools["a"].write(chain[3:], parent=chain[2])
        reply = await pools["a"].fetch("f", chain)
        assert (reply.blocks, reply.fetched, reply.reason) == (2, 0, "no source")
        await settled(pools["a"], held=2, used=3)


async def test_what_the_device_holds_is_no_gap(tmp_path: Path) -> None:
    async with world(tmp_path, "ab") as pools:
        chain = context("chain", 9)
        await pools["a"].write(chain[:3])
        await pools["b"].write(chain[7:], parent=chain[6])
        reply = await pools["a"].fetch("f", chain, [("b", 7, 9)], device_blocks=7)
        assert (reply.blocks, reply.fetched) == (9, 2)
        assert (await pools["a"].status()).pinned_blocks == 5
        assert pools["a"].holds_right_bytes(chain[7:])
        reply = await pools["a"].fetch("g", chain[:7], device_blocks=7)
        assert (reply.blocks, reply.fetched, reply.reason) == (7, 0, "")


async def test_concurrent_fetches_of_one_prefix_copy_it_once(tmp_path: Path) -> None:
    async with world(tmp_path, "ab") as pools:
        chain = context("chain", 40)
        await pools["b"].write(chain)
        replies = await asyncio.gather(*(pools["a"].fetch(f"f{i}", chain[: 20 + i], [("b", 0, 40)]) for i in range(21)))
        assert [reply.blocks for reply in replies] == list(range(20, 41))
        assert pools.nodes["a"].metric("fetched_blocks_total", transport="shm") == 40
        assert sum(reply.fetched for reply in replies) == 40
        for i in range(21):
            await pools["a"].release(f"f{i}")
        await settled(pools["a"], held=0, used=40)
        await settled(pools["b"], held=0, used=40)


async def test_a_fetch_waits_for_a_block_the_own_engine_is_writing(tmp_path: Path) -> None:
    async with world(tmp_path, "ab") as pools:
        (digest,) = context("x", 1)
        await pools["b"].write([digest])
        gate = Gate(pools.nodes["a"])
        first = asyncio.create_task(pools["a"].fetch("one", [digest], [("b", 0, 1)]))
        await gate.begun.wait()
        second = asyncio.create_task(pools["a"].fetch("two", [digest]))
        await asyncio.sleep(0.02)
        gate.open()
        assert ((await first).fetched, (await second).fetched) == (1, 0)
        assert (await second).blocks == 1


class Gate:
    """A transport of a node that copies nothing until it is opened; then what is right but for `torn` blocks."""

    name = "gate"

    def __init__(self, node: Node, torn: Sequence[bytes] = ()) -> None:
        self._node, self._torn = node, set(torn)
        self.begun = asyncio.Event()
        self.jobs: list[CopyJob] = []
        node.pool.transports.insert(0, self)

    def reaches(self, lease: LeaseReply) -> bool:
        return True

    async def begin(self, lease: LeaseReply, blocks: Sequence[BlockCopy]) -> CopyJob:
        self.jobs.append(CopyJob(blocks, asyncio.get_running_loop()))
        self.begun.set()
        return self.jobs[-1]

    def open(self, outcome: Outcome = Outcome.ARRIVED) -> None:
        arena = self._node.pool.store.arena
        for job in self.jobs:
            for i, block in enumerate(job.blocks):
                arena.view(block.slot)[:] = content(block.digest, BLOCK_BYTES)
                job.outcomes[i] = Outcome.CORRUPT if block.digest in self._torn else outcome
            job.finish()
        self.jobs.clear()

    async def close(self) -> None:
        self.open()


async def test_case_15_main_piece_without_its_side_piece(tmp_path: Path) -> None:
    """A block is all its pieces in one slot: one that did not come whole ends the usable prefix there."""
    async with world(tmp_path, "ab", capacity_blocks=8) as pools:
        chain = context("chain", 4)
        await pools["b"].write(chain)
        gate = Gate(pools.nodes["a"], torn=[chain[2]])
        fetching = asyncio.create_task(pools["a"].fetch("f", chain, [("b", 0, 4)]))
        await gate.begun.wait()
        assert (await pools["a"].status()).used_blocks == 4
        gate.open()
        reply = await fetching
        assert (reply.blocks, reply.fetched) == (2, 2)
        assert "corrupt at b" in reply.reason
        await settled(pools["a"], held=2, used=3)
        await pools["a"].write(chain)
        assert await pools["a"].locate(chain) == 4, "what came beyond the gap is of use once the gap is computed"
        assert pools.nodes["a"].metric("undelivered_blocks_total", reason="corrupt") == 1


async def test_case_29_no_deadline_on_a_load(tmp_path: Path) -> None:
    async with world(tmp_path, "ab") as pools:
        chain = context("chain", 4)
        await pools["b"].write(chain)
        gate = Gate(pools.nodes["a"])
        loop = asyncio.get_running_loop()
        began = loop.time()
        reply = await pools["a"].fetch("f", chain, [("b", 0, 4)], deadline_s=0.4)
        assert 0.4 <= loop.time() - began < 0.6
        assert (reply.blocks, reply.reason) == (0, "deadline")
        assert pools.nodes["a"].metric("deadline_exceeded_total") == 1
        assert await pools["a"].locate(chain) == 0
        await settled(pools["a"], held=0, used=4)

        assert await pools["a"].write(chain) == 4, "what is late hinders nobody from computing it"
        gate.open()
        await settled(pools["a"], held=0, used=4)
        assert pools["a"].holds_right_bytes(chain)
        assert pools.nodes["a"].metric("undelivered_blocks_total", reason="late") == 4

        pools.nodes["a"].pool.transports.remove(gate)
        other = context("other", 2)
        await pools["b"].write(other)
        assert (await pools["a"].fetch("g", other, [("b", 0, 2)])).fetched == 2, "no ban sticks to the peer"


async def test_slots_of_a_transfer_nobody_knows_the_end_of_are_used_no_more(tmp_path: Path) -> None:
    async with world(tmp_path, "ab", capacity_blocks=8) as pools:
        chain = context("chain", 3)
        await pools["b"].write(chain)
        gate = Gate(pools.nodes["a"])
        fetching = asyncio.create_task(pools["a"].fetch("f", chain, [("b", 0, 3)]))
        await gate.begun.wait()
        gate.open(Outcome.UNSETTLED)
        reply = await fetching
        assert (reply.blocks, reply.reason) == (0, "unsettled at b")
        await settled(pools["a"], held=0, used=3)
        assert pools.nodes["a"].metric("blocks", state="aside") == 3
        assert await pools["a"].write(context("new", 8)[:5]) == 5


async def test_a_released_fetch_ends_at_once_and_pins_nothing(tmp_path: Path) -> None:
    async with world(tmp_path, "ab") as pools:
        chain = context("chain", 4)
        await pools["b"].write(chain)
        await pools["a"].write(chain[:1])
        gate = Gate(pools.nodes["a"])
        fetching = asyncio.create_task(pools["a"].fetch("f", chain, [("b", 0, 4)]))
        await gate.begun.wait()
        await pools["a"].release("f")
        reply = await fetching
        assert (reply.blocks, reply.reason) == (0, "released")
        gate.open()
        await settled(pools["a"], held=0, used=1)
        await settled(pools["b"], held=0, used=4)


async def test_a_lost_connection_ends_its_fetches_and_pins(tmp_path: Path) -> None:
    async with world(tmp_path, "ab") as pools:
        chain = context("chain", 4)
        await pools["b"].write(chain)
        gate = Gate(pools.nodes["a"])
        other = await connect(pools["a"].settings, "storage")
        await other.write(chain[:2])
        await other.fetch("pinned", chain[:2])
        fetching = asyncio.create_task(other.fetch("f", chain, [("b", 0, 4)]))
        await gate.begun.wait()
        await other.close()
        await asyncio.gather(fetching, return_exceptions=True)
        gate.open()
        await settled(pools["a"], held=0, used=2)


async def test_a_full_pool_takes_what_it_has_room_for(tmp_path: Path) -> None:
    async with world(tmp_path, "ab", capacity_blocks=8) as pools:
        busy, chain = context("busy", 5), context("chain", 6)
        await pools["a"].write(busy)
        await pools["a"].fetch("busy", busy)
        await pools["b"].write(chain)
        reply = await pools["a"].fetch("f", chain, [("b", 0, 6)])
        assert (reply.blocks, reply.fetched) == (3, 3)
        assert reply.reason == "no room for 3 blocks"
        assert pools["a"].holds_right_bytes([*busy, *chain[:3]][:5])
        await settled(pools["a"], held=8, used=8)


async def test_fetches_that_do_not_fit_together_share_the_room_and_end(tmp_path: Path) -> None:
    async with world(tmp_path, "ab", capacity_blocks=12) as pools:
        first, second = context("first", 6), context("second", 6)
        small = await connect(pools["a"].settings, "storage")
        await pools["b"].write(first)
        await pools["b"].write(second)
        busy = context("busy", 4)
        await small.write(busy)
        await small.fetch("busy", busy)
        async with asyncio.timeout(20):
            one, two = await asyncio.gather(
                pools["a"].fetch("one", first, [("b", 0, 6)]), pools["a"].fetch("two", second, [("b", 0, 6)])
            )
        assert one.blocks + two.blocks == 8
        await settled(pools["a"], held=12, used=12)
        assert pools["a"].holds_right_bytes(first[: one.blocks])
        assert pools["a"].holds_right_bytes(second[: two.blocks])
        await small.close()


async def test_peers_in_another_mount_are_reached_over_the_network(tmp_path: Path) -> None:
    """The same kernel, yet the path shows nothing here: a container's own /dev/shm."""
    async with world(tmp_path, "ab") as pools:
        chain = context("chain", 3)
        await pools["b"].write(chain)
        store = pools.nodes["b"].pool.store
        reply_of = store.lease_reply

        def elsewhere(*args: Any) -> LeaseReply:
            return msgspec.structs.replace(reply_of(*args), arena=str(tmp_path / "not mounted here"))

        store.lease_reply = elsewhere  # type: ignore[assignment,method-assign]
        reply = await pools["a"].fetch("f", chain, [("b", 0, 3)])
        assert (reply.fetched, reply.transport) == (3, "mooncake")
        assert pools["a"].holds_right_bytes(chain)


async def test_a_prefix_longer_than_a_batch_comes_in_several(tmp_path: Path, transport: str) -> None:
    async with world(tmp_path, "ab", transport=transport, capacity_blocks=400, debug_checks=False) as pools:
        chain = context("chain", 300)
        for start in range(0, 300, 100):
            await pools["b"].write(chain[start : start + 100], parent=chain[start - 1] if start else b"")
        reply = await pools["a"].fetch("f", chain, [("b", 0, 300)])
        assert (reply.blocks, reply.fetched) == (300, 300)
        assert pools["a"].holds_right_bytes(chain)
        await settled(pools["b"], held=0, used=300)


async def test_a_pull_that_ends_while_blocks_are_pinned_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin_missing = _Fetch._pin_missing

    async def after_all_pulls(fetch: _Fetch) -> None:
        async with asyncio.timeout(20):
            while not all(pull.over for pull in fetch._pulls):
                await asyncio.sleep(0.01)
        await pin_missing(fetch)

    monkeypatch.setattr(_Fetch, "_pin_missing", after_all_pulls)
    async with world(tmp_path, "ab", capacity_blocks=400, debug_checks=False) as pools:
        chain = context("chain", 300)
        for start in range(0, 300, 100):
            await pools["b"].write(chain[start : start + 100], parent=chain[start - 1] if start else b"")
        reply = await pools["a"].fetch("f", chain, [("b", 0, 300)])
        assert (reply.blocks, reply.fetched, reply.transport) == (300, 300, "shm")
