"""The directory as a service, over both buses: what it hears, asks, answers and tells."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import msgspec
from directory_service import (
    SUBJECTS,
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
    metric,
    sees,
    stats,
    stored,
    tell,
)

from schemas.branch import BranchEvent, BranchEventType
from schemas.codec import encode
from schemas.directory import (
    BRANCH_REPLY,
    MATCH_REPLY,
    BranchQuery,
    ReferencesQuery,
)
from schemas.kv import (
    KvLocation,
)
from schemas.phase import Phase, PhaseCommand
from schemas.streams import phase_stream
from services.bus import Delivery


async def test_what_nodes_store_is_matched_and_what_branches_claim_is_told(connect: Connect) -> None:
    bus, pool = await connect(), Pool(await connect(), "p1")
    await pool.start()
    async with directory(await connect()):
        await sees(bus)
        await pool.store(stored(B))
        await matches(bus, B, 8)
        await tell(bus, context(1, "a", B[:6]))

        async def told() -> bool:
            return pool.bits == dict.fromkeys(B[:6], (True, False)) | dict.fromkeys(B[6:], (False, False))

        await eventually(told)
        reply = await match(bus, B, branch="a")
        assert (reply.lineage, reply.branch_blocks, reply.last_prefill_node) == ("extends", 6, "p1")
        await tell(bus, BranchEvent(id="e2", t=0.0, branch="a", type=BranchEventType.END))

        async def untold() -> bool:
            return pool.bits == dict.fromkeys(B, (False, False))

        await eventually(untold)
        seqs = [seq for _, seq, _ in pool.heard]
        assert seqs == list(range(1, len(seqs) + 1)), "numbered without a gap"


async def test_a_pool_that_asks_is_told_everything(connect: Connect) -> None:
    bus, pool = await connect(), Pool(await connect(), "p1")
    await pool.start()
    async with directory(await connect()):
        await sees(bus)
        await pool.store(stored(B))
        await tell(bus, context(1, "a", B))
        await claims(bus, 8)
        await matches(bus, B, 8)

        async def told() -> bool:
            return pool.bits == dict.fromkeys(B, (True, False))

        await eventually(told)
        pool.bits = {1: (True, True)}
        await bus.request(SUBJECTS.query_directory("references"), encode(ReferencesQuery(node="p1")), 5.0)
        await eventually(told)
        assert pool.heard[-1][2], "a full message"


async def test_case_31_and_45_lost_messages_are_repaired_by_one_snapshot(connect: Connect) -> None:
    bus, pool = await connect(), Pool(await connect(), "p1")
    await pool.start()
    async with directory(await connect()) as app:
        await sees(bus)
        await pool.store(stored(B[:2]))
        await matches(bus, B, 2)
        before = pool.snapshots
        await pool.store(stored(B[2:4], parent=B[1]), lost=True)
        await pool.store(stored(B[4:], parent=B[3]))
        await matches(bus, B, 8)
        assert pool.snapshots == before + 1
        await pool.store(stored(chain("more")), lost=True)
        await pool.say([])
        await matches(bus, chain("more"), 1)
        assert pool.snapshots == before + 2, "a heartbeat shows what was lost at the end"
        assert metric(app, "resyncs_total") == pool.snapshots


async def test_case_45_a_slow_directory_drops_and_is_repaired(connect: Connect) -> None:
    bus, pool = await connect(), Pool(await connect(), "p1")
    await pool.start()
    long = chain(*(str(number) for number in range(100)))
    async with directory(await connect(), pending_messages=10) as app:
        await sees(bus)
        await pool.store(stored(long[:1]))
        await matches(bus, long, 1)
        before = pool.snapshots
        for number in range(1, 100):
            pool.seq += 1
            pool.chains.append(stored(long[number : number + 1], parent=long[number - 1]))
        messages = [
            KvLocation(node="p1", incarnation=1, seq=seq, changes=[pool.chains[seq - 1]]) for seq in range(2, 101)
        ]
        await asyncio.gather(*(bus.publish(SUBJECTS.kv_location("p1"), encode(message)) for message in messages))

        async def beat_until_repaired() -> bool:
            await pool.say([])
            await asyncio.sleep(0.1)
            return (await match(bus, long)).blocks == 100

        await eventually(beat_until_repaired)
        assert metric(app, "dropped_locations_total") > 0
        assert pool.snapshots == before + 1


async def test_case_41_a_bad_message_costs_itself_only(connect: Connect) -> None:
    bus = await connect()
    async with directory(await connect()) as app:
        await sees(bus)
        subject = SUBJECTS.kv_location("p1")
        good = KvLocation(node="p1", incarnation=1, seq=1, changes=[stored(B[:4])])
        with_more = msgspec.msgpack.encode(msgspec.msgpack.decode(encode(good)) | {"news": 1})
        without = msgspec.msgpack.encode({"v": 1, "node": "p1", "incarnation": 1, "changes": []})
        newer = msgspec.msgpack.encode({"v": 9, "something": "else"})
        last = KvLocation(node="p1", incarnation=1, seq=2, changes=[stored(B[4:], parent=B[3])])
        for data in (with_more, without, newer, b"\x85", encode(last)):
            await bus.publish(subject, data)
        await matches(bus, B, 8)
        rejected = {reason: metric(app, "rejected_messages_total", reason=reason) for reason in ("schema", "version")}
        assert rejected == {"schema": 1, "version": 1}
        assert metric(app, "rejected_messages_total", reason="bytes") == 1


async def test_events_in_json_are_taken_and_foreign_tenants_are_not(connect: Connect) -> None:
    bus = await connect()
    async with directory(await connect()):
        await sees(bus)
        await tell(bus, context(1, "a", B))
        await tell(bus, context(2, "a", B, tenant="t"))
        await claims(bus, 16)
        end = {"v": 1, "id": "e3", "t": 1, "branch": "a", "type": "end", "source": "cli"}
        subject = SUBJECTS.branch_event("a")
        foreign = json.dumps(end | {"id": "e4", "tenant": "t"}).encode()
        for id_, data in (("e4", foreign), ("e3", json.dumps(end).encode())):
            await bus.store(subject, data, id_, {"content-type": "application/json"})
        await claims(bus, 8)
        data = await bus.request(SUBJECTS.query_directory("branches"), encode(BranchQuery()), 5.0)
        assert [(info.id, info.state) for info in BRANCH_REPLY.decode(data).branches] == [("a", "ended")]
        data = await bus.request(SUBJECTS.query_directory("branch"), encode(BranchQuery(branch="a", tenant="t")), 5.0)
        assert [info.state for info in BRANCH_REPLY.decode(data).branches] == ["active"]


async def test_a_match_that_cannot_be_read_is_answered(connect: Connect) -> None:
    bus = await connect()
    async with directory(await connect()):
        reply = MATCH_REPLY.decode(await bus.request(SUBJECTS.query_directory("match"), b"\x81\xa1v\x01", 5.0))
        assert "missing required field `request`" in reply.error


async def test_case_63_a_refused_node_is_not_matched(connect: Connect) -> None:
    bus = await connect()
    first, second = Pool(bus, "p1"), Pool(bus, "p2")
    async with directory(await connect()) as app:
        await first.hello()
        await first.store(stored(B[:2]))
        await second.hello(block_size=32)
        await second.store(stored(B))
        await matches(bus, B, 2)

        async def refused() -> bool:
            return metric(app, "refused_locations_total") == 1

        await eventually(refused)
        assert (await match(bus, B)).blocks == 2


async def test_case_47_at_most_so_many_snapshots_run_at_once(connect: Connect) -> None:
    bus = await connect()
    pools = [Pool(bus, f"p{number}") for number in range(12)]
    gate = asyncio.Event()
    running: set[str] = set()
    most = 0

    def gated(pool: Pool) -> Callable[[Delivery], Awaitable[bytes]]:
        async def answer(delivery: Delivery) -> bytes:
            nonlocal most
            running.add(pool.name)
            most = max(most, len(running))
            await gate.wait()
            running.discard(pool.name)
            return await pool._snapshot(delivery)

        return answer

    for pool in pools:
        await bus.respond(SUBJECTS.kv_snapshot(pool.name), gated(pool))
    async with directory(await connect(), snapshots_at_once=3) as app:
        for pool in pools:
            await pool.store(stored(B), lost=True)
            await pool.say([])

        async def under_way() -> bool:
            return len(running) == 3

        await eventually(under_way)
        assert (await match(bus, B)).blocks == 0, "matches are answered meanwhile"
        gate.set()

        async def all_in() -> bool:
            return metric(app, "snapshots_total", outcome="complete") == 12

        await eventually(all_in)
        assert most == 3
        assert (await stats(bus)).copies == 12 * 8


async def test_a_phase_command_ends_decode_claims(connect: Connect) -> None:
    bus, pool = await connect(), Pool(await connect(), "d1")
    await pool.start()
    async with directory(await connect()):
        await sees(bus)
        stream = phase_stream(SUBJECTS)
        await bus.ensure_stream(stream.name, stream.subjects, last_per_subject=True)
        await pool.store(stored(B))
        await tell(bus, context(1, "a", B, prefill_node=None, decode_node="d1"))
        await claims(bus, 8)
        await matches(bus, B, 8)
        second = KvLocation(node="p1", incarnation=1, seq=1, changes=[stored(B[:6])])
        await bus.publish(SUBJECTS.kv_location("p1"), encode(second))

        async def both() -> bool:
            return (await stats(bus)).copies == 14

        await eventually(both)
        command = PhaseCommand(id="c", t=0.0, node="d1", phase=Phase.PREFILL, epoch=1, reason="test", decision_id="d")
        await bus.store(SUBJECTS.phase_command("d1"), encode(command), "c")

        async def only_sole() -> bool:
            return pool.bits == dict.fromkeys(B[:6], (False, False)) | dict.fromkeys(B[6:], (True, False))

        await eventually(only_sole)
