"""`ei-router`: hears nodes, engines and the planner, and serves HTTP."""

import asyncio
import secrets
from collections.abc import Callable
from typing import TypeVar

from starlette.routing import BaseRoute

from schemas.codec import RejectedMessage, encode
from schemas.iteration_model import PLANNER_MODELS
from schemas.kv import NODE_HELLO, NodeHello
from schemas.phase import DECISION, PHASE_COMMAND, Decision, Phase
from schemas.serve import PROMPT_REQUEST, REPLY_BATCH, PromptPart
from schemas.streams import all_streams
from schemas.subjects import Subjects
from schemas.telemetry import NODE_TELEMETRY, ROUTER_TELEMETRY, RouterTelemetry
from services.app import App
from services.bus import BusError, Delivery
from services.observe import RateLimitedLog
from services.router.api.errors import ApiError
from services.router.api.formats import ModelFormats
from services.router.core.router import RouterCore
from services.router.dispatch import Dispatcher
from services.router.http import http_routes
from services.router.keys import ApiKeys
from services.router.metrics import RouterMetrics
from services.router.prompt_breaks import PromptBreaks
from services.router.settings import RouterSettings
from services.router.text.images import ImageProcessor, processors_installed
from services.router.text.parsers import Parsers
from services.router.text.tokenizer import BYTES, Tokenizer, UnusableTokenizer, load_tokenizer
from services.router.text.worker_process import WorkerFailed

T = TypeVar("T")
TICK_S = 0.1
HEARTBEAT_S = 1.0
ROUTER_SILENT_S = 5.0
_TOKEN_BYTES = 4


class RouterService:
    """Decode, core, perform; HTTP handlers come in by the dispatcher."""

    def __init__(self, app: App[RouterSettings]) -> None:
        settings = app.settings
        self.app = app
        self.subjects = Subjects(settings.partition)
        self.core = RouterCore(
            settings.limits(),
            rooms_from=secrets.randbits(61),
            node_timeout_s=settings.node_timeout_s,
            model=settings.coefficients,
            fetch=settings.fetch_cost(),
            handoff=settings.handoff_cost(),
            order_weight=settings.order_weight,
            resume_tokens=settings.resume_tokens,
        )
        self.metrics = RouterMetrics(app.metrics, self.core)
        self._incarnation = secrets.randbits(62)
        self.dispatcher = Dispatcher(app, self.core, self.metrics, self._incarnation)
        self.parsers = Parsers()
        self.formats = ModelFormats(settings, self.parsers)
        self.images = ImageProcessor(settings.image_limit_pixels)
        self.keys = ApiKeys.load(settings.keys_file)
        self.tokenizer: Tokenizer | None = None
        self.decision: Decision | None = None
        self._rare = RateLimitedLog(app.log, app.clock)
        self.breaks = PromptBreaks(app.metrics, self._rare)
        self._others: dict[str, float] = {}
        self._connected = True
        self._asked_at = float("-inf")
        self._loading: asyncio.Task[None] | None = None
        self._warmed = False

    async def start(self) -> None:
        """Take what the streams hold, listen, ask who is there, and beat."""
        bus, subjects, anyone, name = self.app.bus, self.subjects, Subjects.ANY, self.app.settings.name
        for stream in all_streams(subjects):
            await bus.ensure_stream(
                stream.name, stream.subjects, max_age_s=stream.max_age_s, last_per_subject=stream.last_per_subject
            )
        await bus.subscribe(subjects.reply(name), self._on_reply)
        await bus.respond(subjects.prompt(name), self._on_prompt)
        await bus.follow(subjects.phase_command(anyone), self._on_command, start="last_per_subject")
        await bus.follow(subjects.planner_decision(), self._on_decision, start="last_per_subject")
        await bus.subscribe(subjects.telemetry_node(anyone), self._on_node)
        await bus.subscribe(subjects.telemetry_router(anyone), self._on_router)
        await bus.subscribe(subjects.node_hello(anyone), self._on_hello)
        await bus.subscribe(subjects.planner_models(), self._on_models)
        bus.on_reconnect(self._beat)
        self.app.tasks.create_task(self._beats(), name="heartbeat")
        self.app.tasks.create_task(self._ticks(), name="ticks")
        self.app.tasks.create_task(self.dispatcher.outbox.run(), name="branch events")
        if self.app.settings.tokenizer:
            self._load_tokenizer(self.app.settings.tokenizer)

    def not_ready(self) -> list[str]:
        """Both phases must have a live node, and prompts a tokenizer."""
        now = self.dispatcher.now
        missing = [p for p in (Phase.PREFILL, Phase.DECODE) if not self.core.nodes.serving(p, now)]
        reasons = [f"no live node serves {phase}" for phase in missing]
        return reasons if self.tokenizer is not None else [*reasons, "no tokenizer yet"]

    def routes(self) -> list[BaseRoute]:
        return http_routes(self)

    async def drain(self) -> None:
        """New requests are refused (`stopping` is set); wait for the open ones."""
        await self.dispatcher.idle()

    async def stop(self) -> None:
        """What is still open ends here: its engines are told."""
        await self.dispatcher.abandon(HEARTBEAT_S)
        await asyncio.gather(self.parsers.stop(), self.images.stop())

    # -- from the bus ---------------------------------------------------------------------------------------------

    async def _on_reply(self, delivery: Delivery) -> None:
        """What one engine has to say leaves for the clients before another's news are read."""
        if (batch := self._decoded(REPLY_BATCH.decode, delivery)) is not None:
            self.dispatcher.perform(self.core.on_reply(batch, self.dispatcher.now))
            await asyncio.sleep(0)

    async def _on_prompt(self, delivery: Delivery) -> bytes:
        """A part of a prompt too large for one message, or of one of its media."""
        wanted = PROMPT_REQUEST.decode(delivery.data)
        request = self.core.requests.get(wanted.id)
        if request is None or request.attempt != wanted.attempt:
            return encode(PromptPart(known=False))
        if wanted.medium is not None:
            data = request.spec.media_data
            if wanted.medium >= len(data):
                return encode(PromptPart(known=False))
            piece = data[wanted.medium][wanted.first : wanted.first + wanted.count]
            return encode(PromptPart(known=True, data=piece))
        first = wanted.first * _TOKEN_BYTES
        part = request.context.packed[first : first + wanted.count * _TOKEN_BYTES]
        return encode(PromptPart(known=True, tokens=part))

    async def _on_command(self, delivery: Delivery) -> None:
        if (command := self._decoded(PHASE_COMMAND.decode, delivery)) is not None:
            self.core.on_command(command)

    async def _on_decision(self, delivery: Delivery) -> None:
        self.decision = self._decoded(DECISION.decode, delivery) or self.decision

    async def _on_node(self, delivery: Delivery) -> None:
        if (beat := self._decoded(NODE_TELEMETRY.decode, delivery)) is None:
            return
        self.dispatcher.perform(self.core.on_telemetry(beat, self.dispatcher.now))
        node = self.core.nodes.get(beat.node)
        if node is not None and node.hello is None:
            await self._ask_who()

    async def _on_hello(self, delivery: Delivery) -> None:
        if (hello := self._decoded(NODE_HELLO.decode, delivery)) is None:
            return
        self.dispatcher.perform(self.core.on_hello(hello, self.dispatcher.now))
        node = self.core.nodes.get(hello.node)
        if node is not None and node.refusal:
            self._rare.warning("node_refused", kind=hello.node, node=hello.node, why=node.refusal)
        elif self.tokenizer is None and self._loading is None:
            self._load_tokenizer(_tokenizer_source(hello))

    async def _on_models(self, delivery: Delivery) -> None:
        if (found := self._decoded(PLANNER_MODELS.decode, delivery)) is not None:
            self.core.on_models(found.models)

    async def _on_router(self, delivery: Delivery) -> None:
        beat = self._decoded(ROUTER_TELEMETRY.decode, delivery)
        if beat is not None and beat.router != self.app.settings.name:
            self._others[beat.router] = self.dispatcher.now

    def _decoded(self, decode: Callable[[bytes], T], delivery: Delivery) -> T | None:
        try:
            return decode(delivery.data)
        except RejectedMessage as rejected:
            self.metrics.rejected.labels(rejected.reason).inc()
            self._rare.warning("rejected", kind=rejected.reason, subject=delivery.subject, error=str(rejected))
            return None

    # -- loops ----------------------------------------------------------------------------------------------------

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now, connected = self.dispatcher.now, self.app.bus.connected
            if connected is not self._connected:
                self._connected = connected
                self.core.on_bus(connected=connected, now=now)
            self._others = {name: heard for name, heard in self._others.items() if now - heard < ROUTER_SILENT_S}
            self.core.other_routers = len(self._others)
            self.dispatcher.perform(self.core.tick(now))
            if not (self._warmed or self.not_ready()):
                self._warmed = True
                self.app.tasks.create_task(self._warm(), name="parsers and processors")
            if self.app.settings.debug_checks:
                self.core.check()

    async def _beats(self) -> None:
        await self._ask_who()
        while True:
            await self._beat()
            await asyncio.sleep(HEARTBEAT_S)

    async def _beat(self) -> None:
        """Tell engines that this router lives."""
        name = self.app.settings.name
        beat = RouterTelemetry(
            router=name,
            t=self.app.clock.wall(),
            incarnation=self._incarnation,
            open_requests=len(self.core.requests),
        )
        await self._publish(self.subjects.telemetry_router(name), encode(beat))

    async def _ask_who(self) -> None:
        """Ask all nodes for their hello, at most once a second."""
        now = self.dispatcher.now
        if now - self._asked_at < HEARTBEAT_S:
            return
        self._asked_at = now
        await self._publish(self.subjects.node_hello_query(), b"")

    async def _publish(self, subject: str, data: bytes) -> None:
        try:
            await self.app.bus.publish(subject, data)
        except BusError as error:
            self._rare.warning("not_published", kind=subject, subject=subject, error=str(error))

    def _load_tokenizer(self, source: str) -> None:
        self._loading = self.app.tasks.create_task(self._load(source), name="tokenizer")

    async def _load(self, source: str) -> None:
        try:
            self.tokenizer = await asyncio.to_thread(load_tokenizer, source)
            self.app.log.info("tokenizer_loaded", source=source, vocabulary=self.tokenizer.vocabulary)
        except UnusableTokenizer as error:
            self.app.log.error("tokenizer_unusable", error=str(error))
            if self.app.settings.tokenizer:
                raise
            self._loading = None

    async def _warm(self) -> None:
        """Start, once requests are served, what the first one with tools or images would wait for."""
        assert self.tokenizer is not None
        try:
            if self.tokenizer.template.takes_tools and self.formats.installed:
                await self.formats.warm(self.tokenizer)
            if self.tokenizer.image_folder and processors_installed():
                await self.images.load(self.tokenizer.image_folder)
        except (ApiError, WorkerFailed) as error:
            self.app.log.warning("not_warmed", error=str(error))


def _tokenizer_source(hello: NodeHello) -> str:
    return hello.tokenizer or BYTES
