"""A pool as its engine and its peers meet it: socket, bus, arena."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from schemas.block_key import pack_keys, short_key
from schemas.codec import encode
from schemas.kv import (
    SNAPSHOT_PART,
    ChangeType,
    KvReference,
    LocationChange,
    ReferenceChange,
    SnapshotRequest,
    Tier,
    keys_of,
)
from schemas.pool import (
    FETCH_REPLY,
    LEASE_REPLY,
    LOCATE_REPLY,
    AllocateRequest,
    AttachRequest,
    DeviceChanges,
    Empty,
    FetchRequest,
    LeaseRequest,
    LocalCall,
    LocateRequest,
    PoolSource,
    ReleaseRequest,
)
from schemas.subjects import Subjects
from services.bus import Delivery, MemoryBus, MemoryHub
from services.kvpool import local_server
from services.local_call import (
    ALLOCATE,
    DEVICE,
    STATUS,
    BlockingLocalClient,
    LocalClient,
    PoolRefused,
    PoolUnavailable,
    frame,
)
from services.local_call.frames import decode_reply
from tests.pool_listener import listening
from tests.pool_node import BLOCK_BYTES, Node, attach, connect, running, settings
from tests.pool_world import content, context

SUBJECTS = Subjects()


@pytest.fixture
async def hub() -> MemoryHub:
    return MemoryHub()


@pytest.fixture
async def node(tmp_path: Path, hub: MemoryHub) -> AsyncIterator[Node]:
    async with running(settings(tmp_path, "a"), MemoryBus(hub)) as found:
        yield found


async def test_blocks_written_over_the_socket_are_read_from_the_arena_and_told_to_all(
    node: Node, hub: MemoryHub
) -> None:
    listener = await listening(MemoryBus(hub), "a")
    client = await connect(node.settings)
    chain = context("chain", 5)
    assert await client.write(chain[:3]) == 3
    assert await client.write(chain, b"") == 2
    assert client.holds_right_bytes(chain)
    assert await client.locate(chain) == 5
    assert await listener.held(Tier.L2, 5) == {short_key(digest) for digest in chain}
    await client.close()


async def test_a_client_of_another_model_is_refused_naming_both(node: Node) -> None:
    wrong = AttachRequest(role="engine", model="large", block_size=16, block_bytes=BLOCK_BYTES, key_version="x")
    client = LocalClient(node.settings.socket_path, wrong)
    with pytest.raises(PoolRefused, match=r"comes with model large .*; this pool holds model tiny"):
        await client.run()
    blocking = BlockingLocalClient(node.settings.socket_path, wrong)
    with pytest.raises(PoolRefused, match="this pool holds model tiny"):
        await asyncio.to_thread(blocking.connect)


async def test_calls_before_attach_and_unknown_verbs_get_a_typed_error(node: Node) -> None:
    reader, writer = await asyncio.open_unix_connection(node.settings.socket_path)

    async def ask(call: LocalCall) -> str:
        writer.write(frame(call))
        size = int.from_bytes(await reader.readexactly(4), "little")
        reply = decode_reply(await reader.readexactly(size))
        assert reply.call == call.call
        return reply.error

    assert await ask(LocalCall(call=7, verb="status")) == "status before attach"
    assert "verb 'steal' is none of attach, allocate" in await ask(LocalCall(call=8, verb="steal"))
    assert await ask(LocalCall(call=9, verb="attach", body=encode(attach(node.settings)))) == ""
    assert "AllocateRequest" in await ask(LocalCall(call=10, verb="allocate", body=b"\x80"))
    assert node.metric("rejected_messages_total", subject="socket.allocate", reason="schema") == 1
    writer.write(b"\xff\xff\xff\xff")
    assert await reader.read() == b"", "nobody knows where the next frame begins"
    writer.close()


async def test_several_calls_are_in_flight_on_one_connection(node: Node) -> None:
    client = await connect(node.settings)
    chains = [context(f"c{i}", 2) for i in range(10)]
    replies = await asyncio.gather(*(client.write(chain) for chain in chains))
    assert replies == [2] * 10
    await client.close()


async def test_threads_share_a_blocking_client(node: Node) -> None:
    client = BlockingLocalClient(node.settings.socket_path, attach(node.settings, "storage"))
    chains = [context(f"t{i}", 3) for i in range(8)]

    def allocate(chain: list[bytes]) -> int:
        return sum(slot is not None for slot in client.call(ALLOCATE, AllocateRequest(digests=b"".join(chain))).slots)

    granted = await asyncio.gather(*(asyncio.to_thread(allocate, chain) for chain in chains))
    assert granted == [3] * 8
    await asyncio.to_thread(client.close)


async def test_blocking_calls_fail_at_once_while_the_pool_is_away_and_work_again_later(
    tmp_path: Path, hub: MemoryHub
) -> None:
    of = settings(tmp_path, "a")
    client = BlockingLocalClient(of.socket_path, attach(of, "storage"), retry_s=0.01)
    with pytest.raises(PoolUnavailable, match="no pool at"):
        client.call(STATUS, Empty())
    incarnations = []
    for _ in range(2):
        async with running(of, MemoryBus(hub)):
            await asyncio.sleep(0.02)
            status = await asyncio.to_thread(client.call, STATUS, Empty())
            assert client.attached is not None
            incarnations.append(status.incarnation)
        with pytest.raises(PoolUnavailable):
            await asyncio.to_thread(client.call, STATUS, Empty())
    assert incarnations[0] < incarnations[1]


async def test_the_client_attaches_again_to_a_restarted_pool_and_reports_its_device_memory(
    tmp_path: Path, hub: MemoryHub
) -> None:
    of = settings(tmp_path, "a")
    chain = context("chain", 4)
    attached: list[int] = []
    again = asyncio.Event()

    async def report(reply: object) -> None:
        change = LocationChange(type=ChangeType.STORED, tier=Tier.L1, hashes=pack_keys(chain))
        await client.call(DEVICE, DeviceChanges(changes=[change]))
        attached.append(1)
        if len(attached) == 2:
            again.set()

    client = LocalClient(of.socket_path, attach(of), on_attached=report)
    task = asyncio.create_task(client.run())
    async with running(of, MemoryBus(hub)):
        await client.wait_attached(20.0)
    listener = await listening(MemoryBus(hub), "a")
    async with running(of, MemoryBus(hub)):
        async with asyncio.timeout(20):
            await again.wait()
        assert await listener.held(Tier.L1, 4) == {short_key(digest) for digest in chain}
    task.cancel()


async def test_losing_the_engine_empties_its_device_tier_for_all(node: Node, hub: MemoryHub) -> None:
    listener = await listening(MemoryBus(hub), "a")
    storage = await connect(node.settings, "storage")
    engine = await connect(node.settings)
    chain = context("chain", 3)
    change = LocationChange(type=ChangeType.STORED, tier=Tier.L1, hashes=pack_keys(chain))
    await engine.client.call(DEVICE, DeviceChanges(changes=[change]))
    await storage.write(chain)
    await listener.held(Tier.L1, 3)
    with pytest.raises(PoolRefused, match="engine's newest connection only"):
        await storage.client.call(DEVICE, DeviceChanges(changes=[change]))
    await engine.close()
    await listener.held(Tier.L1, 0)
    await listener.held(Tier.L2, 3)
    await storage.close()


async def test_a_newer_engine_connection_takes_the_place_of_a_silent_one(node: Node, hub: MemoryHub) -> None:
    listener = await listening(MemoryBus(hub), "a")
    old, new = await connect(node.settings), await connect(node.settings)
    change = LocationChange(type=ChangeType.STORED, tier=Tier.L1, hashes=pack_keys(context("new", 2)))
    await new.client.call(DEVICE, DeviceChanges(changes=[change]))
    await listener.held(Tier.L1, 2)
    await old.close()
    await new.status()
    await listener.held(Tier.L1, 2)
    await new.close()


async def test_heartbeats_repeat_the_last_number(node: Node, hub: MemoryHub) -> None:
    listener = await listening(MemoryBus(hub), "a")
    client = await connect(node.settings)
    await client.write(context("chain", 2))
    await listener.held(Tier.L2, 2)
    async with asyncio.timeout(20):
        while len([message for message in listener.messages if not message.changes]) < 2:
            listener.came.clear()
            await listener.came.wait()
    last = listener.messages[-1]
    assert (last.seq, last.changes) == ((await client.status()).last_kv_seq, [])
    await client.close()


async def test_a_snapshot_says_everything_as_of_one_number(node: Node, hub: MemoryHub) -> None:
    bus = MemoryBus(hub)
    client = await connect(node.settings)
    chain, other = context("chain", 6), context("other", 3)
    await client.write(chain)
    await client.write(other)
    keys: set[int] = set()
    cursor: int | None = 0
    snapshot = None
    while cursor is not None:
        request = SnapshotRequest(cursor=cursor, snapshot=snapshot)
        part = SNAPSHOT_PART.decode(await bus.request(SUBJECTS.kv_snapshot("a"), encode(request), 10.0))
        assert part.seq == (await client.status()).last_kv_seq
        snapshot, cursor = part.snapshot, part.next_cursor
        for change in part.changes:
            keys |= set(keys_of(change.hashes).tolist())
    assert keys == {short_key(digest) for digest in [*chain, *other]}
    unknown = SnapshotRequest(cursor=3, snapshot="no such")
    part = SNAPSHOT_PART.decode(await bus.request(SUBJECTS.kv_snapshot("a"), encode(unknown), 10.0))
    assert part.snapshot not in ("no such", snapshot), "a snapshot that is no more begins anew"
    await client.close()


async def test_references_are_asked_for_at_the_start_and_after_a_gap(tmp_path: Path, hub: MemoryHub) -> None:
    bus = MemoryBus(hub)
    chain = context("chain", 4)
    asked = asyncio.Queue[bytes]()
    of = settings(tmp_path, "a")
    seq = 10

    async def answer(request: Delivery) -> bytes:
        change = ReferenceChange(referenced=True, hashes=pack_keys(chain[:2]))
        full = KvReference(node="a", incarnation=5, seq=seq, full=True, changes=[change])
        await bus.publish(SUBJECTS.kv_reference("a"), encode(full))
        asked.put_nowait(request.data)
        return encode(Empty())

    await bus.respond(SUBJECTS.query_directory("references"), answer)
    async with running(of, MemoryBus(hub)) as node:
        client = await connect(of)
        await client.write(chain)
        async with asyncio.timeout(20):
            await asked.get()
        change = ReferenceChange(referenced=True, hashes=pack_keys(chain))
        for number in (11, 13):
            message = KvReference(node="a", incarnation=5, seq=number, changes=[change])
            await bus.publish(SUBJECTS.kv_reference("a"), encode(message))
        seq = 13
        async with asyncio.timeout(20):
            await asked.get()
            while (await client.status()).referenced_blocks != 2:
                await asyncio.sleep(0.01)
        await bus.publish(SUBJECTS.kv_reference("a"), b"junk")
        async with asyncio.timeout(20):
            while not node.metric("rejected_messages_total", subject="kv.reference", reason="schema"):
                await asyncio.sleep(0.01)
        await client.close()
    assert asked.empty(), "one question per gap"


async def test_peers_lease_locate_and_release_over_the_bus(node: Node, hub: MemoryHub) -> None:
    bus = MemoryBus(hub)
    client = await connect(node.settings)
    chain = context("chain", 3)
    await client.write(chain)
    packed = b"".join(chain)
    located = await bus.request(SUBJECTS.pool("locate", "a"), encode(LocateRequest(digests=packed)), 10.0)
    assert LOCATE_REPLY.decode(located).blocks == 3
    lease = LEASE_REPLY.decode(
        await bus.request(SUBJECTS.pool("lease", "a"), encode(LeaseRequest(id="l", digests=packed)), 10.0)
    )
    assert len(lease.slots) == 3
    assert lease.arena == str(node.settings.arena_path)
    assert (await client.status()).pinned_blocks == 3
    for _ in range(2):
        await bus.request(SUBJECTS.pool("release", "a"), encode(ReleaseRequest(id="l")), 10.0)
    assert (await client.status()).pinned_blocks == 0
    broken = LEASE_REPLY.decode(await bus.request(SUBJECTS.pool("lease", "a"), b"\x01", 10.0))
    assert "LeaseRequest" in broken.error
    assert node.metric("rejected_messages_total", subject="pool.lease", reason="schema") == 1
    await client.close()


async def test_a_fetch_over_the_bus_pins_apart_from_the_engine_and_store_pins_nothing(
    node: Node, tmp_path: Path, hub: MemoryHub
) -> None:
    bus = MemoryBus(hub)
    chain = context("chain", 4)
    async with running(settings(tmp_path, "b"), MemoryBus(hub)) as other:
        here, there = await connect(node.settings), await connect(other.settings)
        await there.write(chain)
        request = FetchRequest(
            id="same", digests=b"".join(chain), sources=[PoolSource(node="b", first=0, last=4)], deadline_s=5.0
        )
        stored = FETCH_REPLY.decode(await bus.request(SUBJECTS.pool("store", "a"), encode(request), 5.0))
        assert (stored.blocks, stored.fetched) == (4, 4)
        assert (await here.status()).pinned_blocks == 0
        assert (await here.fetch("same", chain[:2])).blocks == 2
        fetched = FETCH_REPLY.decode(await bus.request(SUBJECTS.pool("fetch", "a"), encode(request), 5.0))
        assert (fetched.blocks, fetched.fetched) == (4, 0)
        await bus.request(SUBJECTS.pool("release", "a"), encode(ReleaseRequest(id="same")), 10.0)
        assert (await here.status()).pinned_blocks == 2
        await here.release("same")
        assert (await here.status()).pinned_blocks == 0
        await here.close()
        await there.close()


async def test_a_client_that_never_reads_is_cut_off(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_server, "UNREAD_BYTES", 64 << 10)
    _, writer = await asyncio.open_unix_connection(node.settings.socket_path, limit=1)
    writer.write(frame(LocalCall(call=1, verb="attach", body=encode(attach(node.settings, "storage")))))
    call = LocalCall(call=2, verb="locate", body=encode(LocateRequest(digests=content(b"12345678", 32).tobytes())))
    flood = frame(call) * 2_000

    async def ask_for_ever() -> None:
        while True:
            writer.write(flood)
            await writer.drain()

    async with asyncio.timeout(30):
        with pytest.raises(ConnectionError):
            await ask_for_ever()
    writer.close()
