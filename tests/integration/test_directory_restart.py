"""A directory that ends in whatever way and starts again knows what it knew."""

import asyncio
import os
import sys
from pathlib import Path

import msgspec
import pytest
from directory_service import (
    B,
    Connect,
    Pool,
    chain,
    claims,
    context,
    directory,
    eventually,
    match,
    matches,
    sees,
    stats,
    stored,
    tell,
)

from schemas.branch import BranchEvent, BranchEventType
from services.bus import BusError, NoResponders
from services.directory.checkpoints import NewFile, frame, read
from services.directory.core.checkpoint import Part


@pytest.mark.parametrize("kept", [True, False], ids=["checkpoint", "stream only"])
async def test_case_39_a_restarted_directory_knows_as_much_as_before(
    nats_url: str, nats_connect: Connect, tmp_path: Path, kept: bool
) -> None:
    bus = await nats_connect(nats_url)  # type: ignore[call-arg]
    pools = [Pool(await nats_connect(nats_url), name) for name in ("p1", "p2")]  # type: ignore[call-arg]
    for pool in pools:
        await pool.start()
    other = chain(*"xyz")
    state = {"state_dir": str(tmp_path / "state")} if kept else {}
    async with directory(await nats_connect(nats_url), **state):  # type: ignore[call-arg]
        await sees(bus)
        await pools[0].store(stored(B[:5]))
        await pools[1].store(stored(other))
        await tell(bus, context(1, "a", B[:5]))
        await tell(bus, context(2, "b", other, prefill_node="p2"))
        await tell(bus, BranchEvent(id="e3", t=0.0, branch="c", type=BranchEventType.FORK, parent="b"))
        await claims(bus, 11)
        await matches(bus, B, 5)
        await matches(bus, other, 3)
        before = await stats(bus)
    if kept:
        assert os.listdir(tmp_path / "state") == ["directory-p0.msgpack"]
    await tell(bus, BranchEvent(id="e4", t=0.0, branch="c", type=BranchEventType.END))
    bits = {pool.name: dict(pool.bits) for pool in pools}
    async with asyncio.timeout(5.0), directory(await nats_connect(nats_url), **state):  # type: ignore[call-arg]
        await sees(bus)
        after = await stats(bus)
        assert after.incarnation > before.incarnation
        assert (after.copies, after.active_branches, after.claims) == (8, 2, 8)
        await matches(bus, B, 5)
        assert (await match(bus, B, branch="a")).branch_blocks == 5

        async def same() -> bool:
            return {pool.name: pool.bits for pool in pools} == bits

        await eventually(same)


async def test_a_checkpoint_of_another_stream_is_followed_by_all_of_the_new_one(
    nats_url: str, nats_connect: Connect, tmp_path: Path
) -> None:
    path = tmp_path / "directory-p0.msgpack"
    bus = await nats_connect(nats_url)  # type: ignore[call-arg]
    async with directory(await nats_connect(nats_url), state_dir=str(tmp_path)):  # type: ignore[call-arg]
        await sees(bus)
        for number in range(5):
            await tell(bus, context(number, f"b{number}", B))
        await claims(bus, 40)
    end = read(path)[-1].end
    assert end is not None
    later = msgspec.structs.replace(end, sequence=1_000_000)
    file = NewFile(path)
    file.write(frame(Part(chains=[], branches=[], gone=[], events=[], media=[], end=later)))
    file.publish()
    file.close()
    async with directory(await nats_connect(nats_url), state_dir=str(tmp_path)):  # type: ignore[call-arg]
        await sees(bus)
        await claims(bus, 40)
    path.write_bytes(b"junk")
    async with directory(await nats_connect(nats_url), state_dir=str(tmp_path)):  # type: ignore[call-arg]
        await sees(bus)
        await claims(bus, 40)


async def test_the_directory_is_blind_until_a_slow_node_has_told_what_it_holds(connect: Connect) -> None:
    bus, pool = await connect(), Pool(await connect(), "p1")
    await pool.start()
    pool.answering.clear()
    await pool.store(stored(B), lost=True)
    async with directory(await connect()):

        async def asked() -> bool:
            return pool.snapshots == 1

        await eventually(asked)
        await asyncio.sleep(0.2)
        assert (await match(bus, B)).blind
        assert pool.heard == [], "nothing is told while not all is known"
        pool.answering.set()
        await sees(bus)
        assert (await match(bus, B)).blocks == 8


async def test_case_39_a_killed_directory_process_comes_back(
    nats_url: str, nats_connect: Connect, tmp_path: Path
) -> None:
    bus = await nats_connect(nats_url)  # type: ignore[call-arg]
    pool = Pool(await nats_connect(nats_url), "p1")  # type: ignore[call-arg]
    await pool.start()
    environment = os.environ | {
        "EI_NATS_URL": nats_url,
        "EI_STATE_DIR": str(tmp_path / "state"),
        "EI_SEE_AFTER_S": "0.1",
        "EI_CHECKPOINT_S": "0.2",
        "EI_NODE_TIMEOUT_S": "60",
    }

    async def up(process: asyncio.subprocess.Process) -> None:
        async def seeing() -> bool:
            assert process.returncode is None, "the directory ended"
            try:
                return not (await stats(bus)).blind
            except NoResponders:
                return False

        await eventually(seeing, 30.0)

    command = (sys.executable, "-m", "services.directory")
    first = await asyncio.create_subprocess_exec(*command, env=environment)
    try:
        await up(first)
        await pool.store(stored(B))
        await matches(bus, B, 8)
        await tell(bus, context(1, "a", B))
        await claims(bus, 8)
    finally:
        first.kill()
        await first.wait()
    with pytest.raises(BusError):
        await match(bus, B)
    await tell(bus, context(2, "b", B[:4]))
    second = await asyncio.create_subprocess_exec(*command, env=environment)
    try:
        await up(second)
        await claims(bus, 12)
        await matches(bus, B, 8)
    finally:
        second.terminate()
        assert await second.wait() == 0
