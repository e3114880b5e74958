"""Branch events that cannot be what they say: rejected when they come, and again when a restart reads the stream."""

import asyncio
import json
from pathlib import Path

import msgpack
from directory_service import SUBJECTS, Connect, directory, eventually, metric, sees, tell

from schemas.branch import LARGEST_VERSION, BranchEvent, BranchEventType, BranchInfo
from schemas.codec import encode
from schemas.directory import BRANCH_REPLY, BranchQuery
from services.bus import Bus

JSON = {"content-type": "application/json"}


async def listed(bus: Bus) -> dict[str, BranchInfo]:
    asked = await bus.request(SUBJECTS.query_directory("branches"), encode(BranchQuery()), 5.0)
    return {branch.id: branch for branch in BRANCH_REPLY.decode(asked).branches}


async def test_integers_beyond_their_limits_are_rejected_also_from_the_stream(
    nats_url: str, nats_connect: Connect, tmp_path: Path
) -> None:
    async def connect() -> Bus:
        return await nats_connect(nats_url)  # type: ignore[call-arg]

    bus = await connect()
    subject = SUBJECTS.branch_event("p")
    async with directory(await connect(), state_dir=str(tmp_path), checkpoint_s=0.1) as app:
        await sees(bus)
        opened = {"v": 1, "id": "j", "t": 1, "branch": "p", "type": "open"}
        await bus.store(subject, json.dumps(opened | {"version": 10**30}).encode(), "j", JSON)
        for number, (field, value) in enumerate([("version", 2**64 - 1), ("life", 2**63), ("blocks", 2**32)]):
            event = opened | {"id": f"m{number}", "type": "context", "source": "router", field: value}
            await bus.store(subject, msgpack.packb(event), event["id"])
        await tell(bus, BranchEvent(id="c", t=1.0, branch="p", type=BranchEventType.OPEN, version=LARGEST_VERSION))
        await tell(bus, BranchEvent(id="d", t=1.0, branch="p", type=BranchEventType.COMPACT))
        await tell(bus, BranchEvent(id="e", t=1.0, branch="q", type=BranchEventType.OPEN))
        await eventually(lambda: known(bus, "q"))
        assert (await listed(bus))["p"].version == LARGEST_VERSION
        assert metric(app, "rejected_messages_total", reason="schema") == 4
        await asyncio.sleep(0.3)
        assert metric(app, "checkpoint_failures_total") == 0
        assert metric(app, "checkpoint_bytes") > 0
    for state_dir, read_again in ((str(tmp_path), 0), ("", 4)):
        async with directory(await connect(), state_dir=state_dir) as app:
            await sees(bus)
            assert (await listed(bus)).keys() == {"p", "q"}
            assert metric(app, "rejected_messages_total", reason="schema") == read_again


async def known(bus: Bus, branch: str) -> bool:
    return branch in await listed(bus)
