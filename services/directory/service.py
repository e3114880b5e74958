"""`ei-directory`: hears locations and branch events, answers matches, tells pools what is referenced."""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from starlette.routing import BaseRoute

from schemas.branch import BRANCH_EVENT, DEFAULT_TENANT, BranchEvent
from schemas.codec import Message, RejectedMessage, encode
from schemas.directory import BRANCH_QUERY, MATCH_QUERY, REFERENCES_QUERY, BranchReply
from schemas.kv import KV_LOCATION, NODE_HELLO, SNAPSHOT_PART, KvReference, ReferenceChange, SnapshotRequest
from schemas.phase import PHASE_COMMAND
from schemas.streams import branch_stream, phase_stream
from schemas.subjects import Subjects
from services.app import App
from services.bus import BusError, Delivery
from services.directory.core.directory import Directory
from services.directory.core.effects import Effect, NeedSnapshot, NodeLost, NodeRefused, ReferencesChanged
from services.directory.settings import DirectorySettings
from services.observe import RateLimitedLog

T = TypeVar("T")
TICK_S = 1.0
WORK_STEPS = 64
SNAPSHOT_TIMEOUT_S = 5.0


class DirectoryService:
    """Decode, core, perform. Matches are answered inline; snapshots are pulled by tasks of their own."""

    def __init__(self, app: App[DirectorySettings]) -> None:
        self._app = app
        self._subjects = Subjects(app.settings.partition)
        self._core = Directory(app.settings.core(), time.time_ns(), blind=True)
        self._rare = RateLimitedLog(app.log, app.clock)
        self._rejected = app.metrics.counter("rejected_messages_total", "messages that could not be read", ["reason"])
        self._work = asyncio.Event()
        self._slots = asyncio.Semaphore(app.settings.snapshots_at_once)
        self._pulling: set[str] = set()
        self._sequences: dict[str, int] = {}
        self._announced: dict[str, list[ReferencesChanged]] = {}
        self._announce = asyncio.Event()

    async def start(self) -> None:
        bus, subjects, anyone = self._app.bus, self._subjects, Subjects.ANY
        for stream in (branch_stream(subjects), phase_stream(subjects)):
            await bus.ensure_stream(
                stream.name, stream.subjects, max_age_s=stream.max_age_s, last_per_subject=stream.last_per_subject
            )
        await bus.subscribe(subjects.kv_location(anyone), self._on_location)
        await bus.subscribe(subjects.node_hello(anyone), self._on_hello)
        await bus.follow(subjects.phase_command(anyone), self._on_command, start="last_per_subject")
        await bus.follow(subjects.branch_events(), self._on_branch_event, start="all")
        await bus.respond(subjects.query_directory("match"), self._match)
        await bus.respond(subjects.query_directory("branch"), self._branches)
        await bus.respond(subjects.query_directory("branches"), self._branches)
        await bus.respond(subjects.query_directory("references"), self._references)
        await bus.respond(subjects.query_directory("stats"), self._stats)
        for loop in (self._ticks, self._works, self._announcements, self._open_eyes):
            self._app.tasks.create_task(loop(), name=f"directory {loop.__name__}")
        await bus.publish(subjects.node_hello_query(), b"")

    def not_ready(self) -> list[str]:
        return []

    def routes(self) -> list[BaseRoute]:
        return []

    async def drain(self) -> None:
        """Nothing waits."""

    async def stop(self) -> None:
        """Nothing is held."""

    async def _on_location(self, delivery: Delivery) -> None:
        if (message := self._decoded(KV_LOCATION.decode, delivery)) is not None:
            self._perform(self._core.on_location(message, self._now()))

    async def _on_hello(self, delivery: Delivery) -> None:
        if (hello := self._decoded(NODE_HELLO.decode, delivery)) is not None:
            self._perform(self._core.on_hello(hello, self._now()))

    async def _on_command(self, delivery: Delivery) -> None:
        if (command := self._decoded(PHASE_COMMAND.decode, delivery)) is not None:
            self._perform(self._core.on_phase(command))

    async def _on_branch_event(self, delivery: Delivery) -> None:
        as_json = delivery.headers.get("content-type", "").startswith("application/json")
        event = self._decoded(BRANCH_EVENT.decode_json if as_json else BRANCH_EVENT.decode, delivery)
        if event is not None:
            self._perform(self._core.on_branch_event(self._spoken_for(event), self._now()))

    @staticmethod
    def _spoken_for(event: BranchEvent) -> BranchEvent:
        """Only routers know tenants; anybody else speaks for the default one."""
        if event.tenant == DEFAULT_TENANT or event.source == "router":
            return event
        return BranchEvent(**{name: getattr(event, name) for name in event.__struct_fields__} | {"tenant": ""})

    async def _match(self, delivery: Delivery) -> bytes:
        return encode(self._core.match(MATCH_QUERY.decode(delivery.data), self._now()))

    async def _branches(self, delivery: Delivery) -> bytes:
        query = BRANCH_QUERY.decode(delivery.data)
        return encode(BranchReply(branches=self._core.listed(query, self._now(), self._app.clock.wall())))

    async def _references(self, delivery: Delivery) -> bytes:
        self._perform(self._core.list_references(REFERENCES_QUERY.decode(delivery.data).node))
        return encode(Message())

    async def _stats(self, delivery: Delivery) -> bytes:
        return encode(self._core.stats())

    def _now(self) -> float:
        return self._app.clock.now()

    def _decoded(self, decode: Callable[[bytes], T], delivery: Delivery) -> T | None:
        try:
            return decode(delivery.data)
        except RejectedMessage as rejected:
            self._rejected.labels(rejected.reason).inc()
            self._rare.warning("rejected", kind=rejected.reason, subject=delivery.subject, error=str(rejected))
            return None

    def _perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case NeedSnapshot(node=node):
                    if node not in self._pulling:
                        self._pulling.add(node)
                        self._app.tasks.create_task(self._pull(node, effect.reason), name=f"snapshot {node}")
                case ReferencesChanged(node=node):
                    self._announced.setdefault(node, []).append(effect)
                    self._announce.set()
                case NodeRefused(node=node, text=text):
                    self._rare.warning("node_refused", kind=node, node=node, error=text)
                case NodeLost(node=node, silent_s=silent_s):
                    self._app.log.warning("node_lost", node=node, silent_s=silent_s)
        if self._core.has_work:
            self._work.set()

    async def _pull(self, node: str, reason: str) -> None:
        self._app.log.info("snapshot", node=node, reason=reason)
        request = SnapshotRequest()
        try:
            async with self._slots:
                while True:
                    data = await self._app.bus.request(
                        self._subjects.kv_snapshot(node), encode(request), SNAPSHOT_TIMEOUT_S
                    )
                    part = SNAPSHOT_PART.decode(data)
                    self._perform(self._core.on_snapshot(part, self._now()))
                    if part.next_cursor is None:
                        return
                    request = SnapshotRequest(cursor=part.next_cursor, snapshot=part.snapshot)
        except (BusError, RejectedMessage) as error:
            self._rare.warning("snapshot_failed", kind=node, node=node, error=str(error))
            self._core.on_snapshot_failed(node, self._now())
        finally:
            self._pulling.discard(node)

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._perform(self._core.tick(self._now()))
            if self._app.settings.debug_checks:
                self._core.check()

    async def _works(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            while self._core.has_work:
                self._perform(self._core.work(WORK_STEPS))
                await asyncio.sleep(0)

    async def _announcements(self) -> None:
        while True:
            await self._announce.wait()
            await asyncio.sleep(0.01)
            self._announce.clear()
            announced, self._announced = self._announced, {}
            for node, changes in announced.items():
                await self._tell(node, changes)

    async def _tell(self, node: str, changes: list[ReferencesChanged]) -> None:
        full = next((index for index in reversed(range(len(changes))) if changes[index].full), None)
        kept = changes if full is None else changes[full:]
        sequence = self._sequences[node] = self._sequences.get(node, 0) + 1
        message = KvReference(
            node=node,
            incarnation=self._core.incarnation,
            seq=sequence,
            full=full is not None,
            changes=[
                ReferenceChange(referenced=one.referenced, unreachable=one.unreachable, hashes=one.keys) for one in kept
            ],
        )
        await self._app.bus.publish(self._subjects.kv_reference(node), encode(message))

    async def _open_eyes(self) -> None:
        await asyncio.sleep(self._app.settings.see_after_s)
        while self._pulling or self._core.has_work:
            await asyncio.sleep(0.05)
        self._perform(self._core.see())
