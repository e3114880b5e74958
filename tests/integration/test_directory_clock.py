"""A directory that starts again on a clock that went back is followed all the same."""

import time
from pathlib import Path

import pytest
from directory_service import claims, context, directory, eventually, sees, stats, tell

from schemas.block_key import short_key
from schemas.branch import BranchEvent, BranchEventType
from services.bus import MemoryBus, MemoryHub
from tests.pool_node import connect, running, settings
from tests.pool_world import context as digests_of

AHEAD_NS = 600 * 10**9


async def test_pools_follow_a_directory_whose_clock_went_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub, of = MemoryHub(), settings(tmp_path, "a")
    bus, chain = MemoryBus(hub), digests_of("chain", 4)
    async with running(of, MemoryBus(hub)):
        client = await connect(of)
        await client.write(chain)

        async def referenced(blocks: int) -> None:
            async def told() -> bool:
                return (await client.status()).referenced_blocks == blocks

            await eventually(told)

        right = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: right() + AHEAD_NS)
        async with directory(MemoryBus(hub)):
            await sees(bus)
            await tell(bus, context(1, "b", [short_key(digest) for digest in chain], prefill_node="a"))
            await referenced(4)
            ahead = (await stats(bus)).incarnation
        monkeypatch.undo()
        async with directory(MemoryBus(hub)):
            await sees(bus)
            await claims(bus, 4)
            await tell(bus, BranchEvent(id="e2", t=0.0, branch="b", type=BranchEventType.END))
            await referenced(0)
            assert (await stats(bus)).incarnation > ahead, "it learned from the pool what it has to be above"
        await client.close()
