"""Pools around a directory service, and what tests ask of both."""

import asyncio
import hashlib
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from schemas.branch import BranchEvent, BranchEventType
from schemas.codec import Message, encode
from schemas.directory import (
    MATCH_REPLY,
    STATS_REPLY,
    MatchQuery,
    MatchReply,
    StatsReply,
)
from schemas.kv import (
    KV_REFERENCE,
    SNAPSHOT_REQUEST,
    Capacities,
    ChangeType,
    KvLocation,
    LocationChange,
    NodeHello,
    SnapshotPart,
    Tier,
    keys_of,
)
from schemas.subjects import Subjects
from services.app import App, serve
from services.bus import Bus, Delivery
from services.directory.service import DirectoryService
from services.directory.settings import DirectorySettings

Connect = Callable[[], Awaitable[Bus]]
SUBJECTS = Subjects()


def chain(*labels: str) -> list[int]:
    keys, digest = [], b""
    for label in labels:
        digest = hashlib.sha256(digest + label.encode()).digest()
        keys.append(int.from_bytes(digest[:8], "big"))
    return keys


def pack(keys: list[int]) -> bytes:
    return array("Q", keys).tobytes()


def stored(keys: list[int], parent: int | None = None) -> LocationChange:
    return LocationChange(type=ChangeType.STORED, tier=Tier.L2, parent=parent, hashes=pack(keys))


B = chain(*"01234567")


class Pool:
    """The pool of a node: says what it stores, answers snapshots in parts, believes what it is told of references."""

    def __init__(self, bus: Bus, name: str) -> None:
        self.bus, self.name = bus, name
        self.seq = 0
        self.chains: list[LocationChange] = []
        self.bits: dict[int, tuple[bool, bool]] = {}
        self.heard: list[tuple[int, int, bool]] = []
        self.snapshots = 0
        self.answering = asyncio.Event()
        self.answering.set()
        self.busy = self.busiest = 0

    async def start(self) -> None:
        await self.bus.respond(SUBJECTS.kv_snapshot(self.name), self._snapshot)
        await self.bus.subscribe(SUBJECTS.kv_reference(self.name), self._told)
        await self.bus.subscribe(SUBJECTS.node_hello_query(), self._who)

    async def store(self, *changes: LocationChange, lost: bool = False) -> None:
        self.seq += 1
        self.chains += changes
        if not lost:
            await self.say(list(changes))

    async def say(self, changes: list[LocationChange]) -> None:
        message = KvLocation(node=self.name, incarnation=1, seq=self.seq, changes=changes)
        await self.bus.publish(SUBJECTS.kv_location(self.name), encode(message))

    async def hello(self, **fields: object) -> None:
        given = {
            "node": self.name,
            "incarnation": 1,
            "engine_incarnation": 1,
            "model": "m",
            "block_size": 4,
            "key_version": "k",
            "ranks": 1,
            "engine": "timed",
            "dtype": "bf16",
            "capacities": Capacities(l1_tokens=1, l2_tokens=1),
            "transfer": "",
        }
        await self.bus.publish(SUBJECTS.node_hello(self.name), encode(NodeHello(**given | fields)))  # type: ignore[arg-type]

    async def _who(self, _: Delivery) -> None:
        await self.hello()

    async def _snapshot(self, delivery: Delivery) -> bytes:
        request = SNAPSHOT_REQUEST.decode(delivery.data)
        self.snapshots += request.cursor == 0
        await self.answering.wait()
        at = request.cursor
        more = at + 1 if at + 1 < len(self.chains) else None
        part = SnapshotPart(
            node=self.name,
            incarnation=1,
            seq=self.seq,
            snapshot=f"s{self.snapshots}",
            changes=self.chains[at : at + 1],
            next_cursor=more,
        )
        return encode(part)

    async def _told(self, delivery: Delivery) -> None:
        message = KV_REFERENCE.decode(delivery.data)
        self.heard.append((message.incarnation, message.seq, message.full))
        if message.full:
            self.bits.clear()
        for change in message.changes:
            self.bits |= dict.fromkeys(keys_of(change.hashes).tolist(), (change.referenced, change.unreachable))


@asynccontextmanager
async def directory(bus: Bus, **settings: object) -> AsyncIterator[App[DirectorySettings]]:
    """A running directory; nodes have 50 ms to say hello."""
    stop = asyncio.Event()
    apps: asyncio.Queue[App[DirectorySettings]] = asyncio.Queue()
    given = {"see_after_s": 0.05, "debug_checks": True, "node_timeout_s": 60.0}
    chosen = DirectorySettings(**given | settings)  # type: ignore[arg-type]
    running = asyncio.create_task(serve(DirectoryService, chosen, stop=stop, bus=bus, started=apps.put_nowait))
    started = asyncio.ensure_future(apps.get())
    await asyncio.wait({running, started}, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    try:
        yield started.result()
    finally:
        stop.set()
        await running
        await bus.close()


async def eventually(condition: Callable[[], Awaitable[bool]], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.01)


async def match(bus: Bus, keys: list[int], **fields: object) -> MatchReply:
    query = MatchQuery(**{"request": "r", "hashes": pack(keys)} | fields)  # type: ignore[arg-type]
    return MATCH_REPLY.decode(await bus.request(SUBJECTS.query_directory("match"), encode(query), 5.0))


async def stats(bus: Bus) -> StatsReply:
    return STATS_REPLY.decode(await bus.request(SUBJECTS.query_directory("stats"), encode(Message()), 5.0))


async def matches(bus: Bus, keys: list[int], blocks: int) -> None:
    async def reached() -> bool:
        return (await match(bus, keys)).blocks == blocks

    await eventually(reached)


async def sees(bus: Bus) -> None:
    async def seeing() -> bool:
        return not (await stats(bus)).blind

    await eventually(seeing)


def context(number: int, branch: str, keys: list[int], **fields: object) -> BranchEvent:
    given = {
        "id": f"e{number}",
        "t": 0.0,
        "branch": branch,
        "type": BranchEventType.CONTEXT,
        "source": "router",
        "tip": keys[-1],
        "blocks": len(keys),
        "keys": pack(keys),
        "prompt_blocks": len(keys),
        "prefill_node": "p1",
    }
    return BranchEvent(**given | fields)  # type: ignore[arg-type]


async def tell(bus: Bus, event: BranchEvent) -> None:
    await bus.store(SUBJECTS.branch_event(event.branch, event.tenant), encode(event), event.id)


async def claims(bus: Bus, expected: int) -> None:
    async def reached() -> bool:
        return (await stats(bus)).claims == expected

    await eventually(reached)


def metric(app: App[DirectorySettings], name: str, **labels: str) -> float:
    return app.registry.get_sample_value(f"ei_directory_{name}", labels) or 0.0
