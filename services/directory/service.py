"""`ei-directory`: hears locations, branch events and commands, answers matches, tells pools what is referenced."""

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

from starlette.routing import BaseRoute

from schemas.branch import decode_branch_event
from schemas.codec import RejectedMessage, encode
from schemas.directory import BRANCH_QUERY, MATCH_QUERY, REFERENCES_QUERY, BranchReply, MatchReply
from schemas.kv import KV_LOCATION, NODE_HELLO, KvLocation, SnapshotPart
from schemas.phase import PHASE_COMMAND
from schemas.pool import Empty
from schemas.streams import branch_stream, phase_stream
from schemas.subjects import Subjects
from schemas.telemetry import ROUTER_TELEMETRY
from services.app import App
from services.bus import BusTimeout, BusUnavailable, Delivery, NoResponders, Subscription
from services.bus.jetstream import JetStream
from services.clock import incarnation_above
from services.directory.announcer import Announcer
from services.directory.checkpoints import Checkpoints
from services.directory.core.directory import Directory
from services.directory.core.effects import (
    Effect,
    NeedSnapshot,
    NodeLost,
    NodeRefused,
    ReferencesChanged,
    ValuesChanged,
)
from services.directory.helpings import helping
from services.directory.metrics import DirectoryMetrics
from services.directory.settings import DirectorySettings
from services.directory.snapshots import Snapshots
from services.directory.standby import Standby
from services.observe import RateLimitedLog
from services.settings import seed_named

T = TypeVar("T")
TICK_S = 1.0
LOT_MESSAGES = 64


class DirectoryService:
    """Decode, core, perform. Every handler is done at once; what takes longer is a job of the core or a task here.

    After a start it is blind until the branch events of before it are replayed, and every node that said hello has
    told what it holds.
    """

    def __init__(self, app: App[DirectorySettings]) -> None:
        settings = app.settings
        self._app, self._bus, self._clock = app, app.bus, app.clock
        self._subjects = Subjects(settings.partition)
        self._core = Directory(settings.core(), incarnation_above(), blind=True)
        self._metrics = DirectoryMetrics(app.metrics, self._core)
        self._rare = RateLimitedLog(app.log, app.clock)
        self._announcer = Announcer(app.bus, self._subjects, self._core.incarnation, self._metrics, self._rare)
        self._snapshots = Snapshots(
            app.bus,
            self._subjects,
            app.tasks,
            self._metrics,
            self._rare,
            at_once=settings.snapshots_at_once,
            timeout_s=settings.snapshot_timeout_s,
            loaded=self._on_snapshot,
            failed=self._on_snapshot_failed,
        )
        self._checkpoints = Checkpoints(
            settings.state_dir, settings.partition, self._core, app.clock, self._metrics, app.log
        )
        self._standby = Standby(
            app.bus,
            self._subjects,
            settings.name,
            seed_named(settings.nats_nkey),
            self._core,
            app.clock,
            app.log,
            takeover_s=settings.takeover_s,
            step_down=self._step_down,
            take_over=self._take_over,
        )
        app.metrics.gauge("standby_info", "1 while a newer one serves.", read=lambda: not self._standby.serves)
        self._answering: list[Subscription] = []
        self._lot: list[KvLocation] = []
        self._work = asyncio.Event()
        self._save = asyncio.Event()
        self._sequence = 0
        self._replay_to = 0
        self._greeted = False
        self._started = False

    async def start(self) -> None:
        await self._standby.beat()  # whether the broker lets it is known when it has answered what is asked here
        sequence = await self._checkpoints.restore()
        for stream in (branch_stream(self._subjects), phase_stream(self._subjects)):
            await self._bus.ensure_stream(
                stream.name, stream.subjects, max_age_s=stream.max_age_s, last_per_subject=stream.last_per_subject
            )
        newest, messages = await self._stream()
        self._sequence = sequence if sequence <= newest else 0
        self._replay_to = newest if messages else 0
        await self._listen()
        for loop in (self._ticks, self._works, self._greet, self._saves, self._announcer.run):
            self._app.tasks.create_task(loop(), name=f"directory {loop.__name__.strip('_')}")
        self._bus.on_reconnect(self._ask_who)
        self._started = True

    def not_ready(self) -> list[str]:
        if not self._standby.serves:
            return ["stands by: a newer directory serves"]
        return [] if self._started else ["starting"]

    def routes(self) -> list[BaseRoute]:
        return []

    async def drain(self) -> None:
        """Keep what was heard so far, and let another directory know that this one goes."""
        self._apply_lot()
        await self._standby.leave()
        await self._announcer.flush()
        if self._standby.serves:
            await self._checkpoints.save(lambda: self._sequence)

    async def stop(self) -> None:
        """Nothing is held."""

    async def _listen(self) -> None:
        bus, subjects, anyone = self._bus, self._subjects, Subjects.ANY
        await bus.subscribe(
            subjects.kv_location(anyone),
            self._on_location,
            limit=self._app.settings.pending_messages,
            on_dropped=self._metrics.dropped.inc,
        )
        await bus.subscribe(subjects.node_hello(anyone), self._on_hello)
        await bus.subscribe(subjects.telemetry_router(anyone), self._on_router)
        await bus.follow(subjects.branch_events(), self._on_branch_event, start=self._sequence + 1)
        await bus.follow(subjects.phase_command(anyone), self._on_command, start="last_per_subject")
        await self._standby.start()
        await self._answer()

    async def _answer(self) -> None:
        """Take questions; no answer waits for anything."""
        responders = {
            "match": self._match,
            "branch": self._branches,
            "branches": self._branches,
            "references": self._references,
            "stats": self._stats,
        }
        for verb, responder in responders.items():
            subject = self._subjects.query_directory(verb)
            self._answering.append(await self._bus.respond(subject, responder, limit=1))

    # what is heard

    async def _on_location(self, delivery: Delivery) -> None:
        """Messages that queue are applied together, after those of this turn of the loop."""
        message = self._decoded(KV_LOCATION.decode, delivery)
        if message is not None:
            self._lot.append(message)
            if len(self._lot) == 1:
                asyncio.get_running_loop().call_soon(self._apply_lot)
            elif len(self._lot) == LOT_MESSAGES:
                self._apply_lot()

    def _apply_lot(self) -> None:
        lot, self._lot = self._lot, []
        if lot:
            self._perform(self._core.on_locations(lot, self._clock.now()))

    async def _on_hello(self, delivery: Delivery) -> None:
        hello = self._decoded(NODE_HELLO.decode, delivery)
        if hello is not None:
            self._perform(self._core.on_hello(hello, self._clock.now()))

    async def _on_router(self, delivery: Delivery) -> None:
        beat = self._decoded(ROUTER_TELEMETRY.decode, delivery)
        if beat is not None:
            self._perform(self._core.on_router(beat, self._clock.now()))

    async def _on_branch_event(self, delivery: Delivery) -> None:
        event = self._decoded(lambda data: decode_branch_event(data, delivery.headers, delivery.subject), delivery)
        if event is not None:
            self._metrics.skew.set(self._clock.wall() - event.t)
            self._perform(self._core.on_branch_event(event, self._clock.now()))
        if delivery.sequence is not None:
            self._sequence = delivery.sequence
            if self._core.blind:
                await self._look()

    async def _on_command(self, delivery: Delivery) -> None:
        command = self._decoded(PHASE_COMMAND.decode, delivery)
        if command is not None:
            self._perform(self._core.on_phase(command))
            self._save.set()

    async def _step_down(self) -> None:
        """A newer directory serves: answer nothing, tell the pools nothing."""
        self._announcer.mute()
        self._perform(self._core.stand_by())
        answering, self._answering = self._answering, []
        for subscription in answering:
            await subscription.unsubscribe()

    async def _take_over(self, incarnation: int) -> None:
        """Serve under this incarnation from now on."""
        self._announcer.speak(incarnation)
        self._perform(self._core.speak(incarnation))
        if not self._answering:
            await self._answer()

    def _on_snapshot(self, part: SnapshotPart) -> None:
        self._perform(self._core.on_snapshot(part, self._clock.now()))

    def _on_snapshot_failed(self, node: str) -> None:
        self._core.on_snapshot_failed(node, self._clock.now())

    def _decoded(self, decode: Callable[[bytes], T], delivery: Delivery) -> T | None:
        """The message, or None for one that cannot be read: it costs itself and nothing else."""
        try:
            return decode(delivery.data)
        except RejectedMessage as error:
            self._count(error, delivery)
            return None

    def _count(self, error: RejectedMessage, delivery: Delivery) -> None:
        self._metrics.rejected.labels(error.reason).inc()
        self._rare.warning(
            "rejected", kind=f"{delivery.subject} {error.reason}", subject=delivery.subject, error=str(error)
        )

    # what is asked

    async def _match(self, delivery: Delivery) -> bytes:
        began = time.perf_counter()
        try:
            query = MATCH_QUERY.decode(delivery.data)
        except RejectedMessage as error:
            self._count(error, delivery)
            return encode(MatchReply(blocks=0, error=str(error)))
        reply = encode(self._core.match(query, self._clock.now()))
        self._metrics.match_seconds.observe(time.perf_counter() - began)
        return reply

    async def _branches(self, delivery: Delivery) -> bytes:
        query = BRANCH_QUERY.decode(delivery.data)
        return encode(BranchReply(branches=self._core.listed(query, self._clock.now(), self._clock.wall())))

    async def _references(self, delivery: Delivery) -> bytes:
        """A blind directory says nothing; it tells every pool as soon as it sees."""
        query = REFERENCES_QUERY.decode(delivery.data)
        await self._standby.outrank(query.incarnation)
        self._perform(self._core.list_references(query.node))
        return encode(Empty())

    async def _stats(self, delivery: Delivery) -> bytes:
        return encode(self._core.stats())

    # what is done

    def _perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case ReferencesChanged() | ValuesChanged():
                    self._announcer.tell(effect)
                case NeedSnapshot(node=node, reason=reason):
                    self._snapshots.pull(node, reason)
                case NodeRefused(node=node, text=text):
                    self._app.log.error("node_refused", node=node, error=text)
                case NodeLost(node=node, silent_s=silent_s):
                    self._app.log.warning("node_lost", node=node, silent_s=round(silent_s, 3))
        if self._core.has_work:
            self._work.set()

    async def _works(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            while self._core.has_work:
                self._perform(helping(self._core))
                await asyncio.sleep(0)
            await self._look()

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._perform(self._core.tick(self._clock.now()))
            await self._look()
            await self._standby.tick()
            if self._app.settings.debug_checks:
                self._core.check()

    async def _saves(self) -> None:
        """Keep the state now and then, and at once after a phase command: the streams do not tell what came first."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._app.settings.checkpoint_s):
                    await self._save.wait()
            self._save.clear()
            if self._standby.serves:
                await self._checkpoints.save(lambda: self._sequence)

    # seeing again after a start

    async def _greet(self) -> None:
        await self._ask_who()
        await asyncio.sleep(self._app.settings.see_after_s)
        self._greeted = True
        await self._look()

    async def _ask_who(self) -> None:
        await self._bus.publish(self._subjects.node_hello_query(), b"")

    async def _look(self) -> None:
        """Stop being blind as soon as nothing is missing, and say so before the pools are told anything."""
        replayed = self._sequence >= self._replay_to
        if (
            self._core.blind
            and self._greeted
            and replayed
            and not self._core.has_work
            and not self._core.locations.unsynced()
        ):
            self._perform(self._core.see())
            await self._standby.beat()
            self._app.log.info("sees", blocks=self._core.tree.blocks, branches=len(self._core.branches))

    async def _stream(self) -> tuple[int, int]:
        """The newest sequence of the branch events before this start, and how many are kept; an older one than that of
        the checkpoint means another stream. (0, 0) on a bus that has no streams to ask about."""
        name = branch_stream(self._subjects).name
        while True:
            try:
                state = (await JetStream(self._bus.request).call(f"STREAM.INFO.{name}"))["state"]
                return int(state["last_seq"]), int(state["messages"])
            except NoResponders:
                return 0, 0
            except (BusTimeout, BusUnavailable) as error:
                self._rare.warning("stream_unavailable", error=str(error))
                await asyncio.sleep(1.0)
