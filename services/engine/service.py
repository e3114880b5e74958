"""The engine service of a node: bus and HTTP around queue, backend and pool."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from starlette.routing import BaseRoute

from schemas.codec import Decoder, Message, RejectedMessage, encode
from schemas.phase import PHASE_COMMAND
from schemas.serve import (
    CANCEL_REQUEST,
    HANDOFF,
    RESEND_REQUEST,
    SERVE_REQUEST,
    CancelReply,
    CancelRequest,
    Handoff,
    HandoffReply,
    ReplyBatch,
    ResendRequest,
    ServeReply,
    ServeRequest,
)
from schemas.streams import phase_stream
from schemas.subjects import Subjects, parse
from schemas.telemetry import NODE_TELEMETRY, ROUTER_TELEMETRY
from services.app import App
from services.bus import Delivery
from services.clock import incarnation_above
from services.engine.backend import Backend, BackendEvents, LegKey
from services.engine.core.limits import Limits
from services.engine.core.queueing import Queueing
from services.engine.core.timing import ObservedPrefill, PrefillTime
from services.engine.late_events import LateEvents
from services.engine.metrics import EngineMetrics
from services.engine.node_pool import NodePool
from services.engine.peers import Peers
from services.engine.prompts import PromptReader
from services.engine.replies import Replies
from services.engine.reports import Identity, NodeReports
from services.engine.runner import Runner, Surroundings
from services.engine.settings import EngineSettings
from services.observe import RateLimitedLog

MessageT = TypeVar("MessageT", bound=Message)
Routes = Callable[[], list[BaseRoute]]
_RESPONDERS = 4096


class EngineService:
    """One node's engine. Takes work once backend and pool are there and the broker lets it listen.

    `times` predicts a prefill; without it the engine's own iterations do. `tap` may put itself between the backend and
    the service's events; `routes` are HTTP routes of the backend's own.
    """

    def __init__(
        self,
        app: App[EngineSettings],
        backend: Backend,
        pool: NodePool | None,
        *,
        times: PrefillTime | None = None,
        tap: Callable[[BackendEvents], BackendEvents] | None = None,
        routes: Routes = list,
    ) -> None:
        self._app, self._backend, self._pool, self._times, self._tap = app, backend, pool, times, tap
        self._routes = routes
        self._subjects = Subjects(app.settings.partition)
        self._metrics = EngineMetrics(app.metrics)
        self._log = RateLimitedLog(app.log, app.clock)
        self._identity = Identity(app.settings.node, incarnation_above())
        if pool is not None:
            app.metrics.gauge("pool_attached_count", "1 while the node's pool is there.", read=lambda: pool.attached)
        self._events = LateEvents()
        self.runner: Runner | None = None

    async def start(self) -> None:
        """Start backend and pool connection, then listen."""
        app = self._app
        events = self._tap(self._events) if self._tap is not None else self._events
        await self._backend.start(events)
        self._reports = self._begin()
        self._events.target = self.runner = self._runner(self._reports)
        if self._pool is not None:
            self._pool.start(self._backend.info, app.tasks)
        await self._listen(self.runner)
        app.tasks.create_task(self.runner.around.replies.run(), name="replies")
        app.tasks.create_task(self.runner.run(), name="queue")
        app.bus.on_reconnect(self._reports.hello)
        await self._reports.heartbeat()
        await self._reports.hello()
        self._reports.start(app.tasks)

    def _begin(self) -> NodeReports:
        """The core, once the backend has said what it is, and what reports on it."""
        app, settings, info = self._app, self._app.settings, self._backend.info
        limits = replace(
            Limits.of(settings.node, info),
            max_waiting=settings.max_waiting,
            fetch_grace_s=settings.fetch_grace_s,
            order_weight=settings.order_weight,
            node_timeout_s=settings.node_timeout_s,
            router_timeout_s=settings.router_timeout_s,
        )
        self._observed = ObservedPrefill() if self._times is None else None
        times = self._times or self._observed
        assert times is not None
        self._core = Queueing.of(limits, times, info.rendezvous, settings.phase)
        return NodeReports(
            app.bus,
            self._subjects,
            self._identity,
            self._backend,
            self._pool,
            self._core,
            app.clock,
            self._log,
            lambda: not (self.not_ready() or app.stopping.is_set()),
            lambda: self.runner.decoding_by_length() if self.runner is not None else [],
        )

    def _runner(self, reports: NodeReports) -> Runner:
        app, settings = self._app, self._app.settings
        around = Surroundings(
            backend=self._backend,
            pool=self._pool,
            peers=Peers(app.bus, self._subjects, settings.ask_timeout_s, app.log),
            prompts=PromptReader(app.bus, self._subjects),
            replies=Replies(app.bus, self._subjects, settings.node, self._identity.incarnation, app.clock, app.log),
            reports=reports,
            clock=app.clock,
            metrics=self._metrics,
            log=app.log,
            listening=lambda: app.bus.connected,
            observed=self._observed,
            debug_checks=settings.debug_checks,
        )
        return Runner(self._core, around, app.tasks)

    async def _listen(self, runner: Runner) -> None:
        bus, subjects, node = self._app.bus, self._subjects, self._app.settings.node
        await bus.subscribe(subjects.telemetry_router(subjects.ANY), self._on_router)
        await bus.subscribe(subjects.telemetry_node(subjects.ANY), self._on_node)
        await bus.subscribe(subjects.node_hello_query(), self._on_who)
        for subject, responder in (
            (subjects.serve(node), self._on_serve),
            (subjects.handoff(node), self._on_handoff),
            (subjects.cancel(node), self._on_cancel),
            (subjects.resend(node), self._on_resend),
        ):
            await bus.respond(subject, responder, limit=_RESPONDERS)
        stream = phase_stream(subjects)
        await bus.ensure_stream(
            stream.name, stream.subjects, max_age_s=stream.max_age_s, last_per_subject=stream.last_per_subject
        )
        await bus.follow(subjects.phase_command(node), self._on_command, start="last_per_subject")

    def not_ready(self) -> list[str]:
        """What is missing before work can be taken. A pool that was there and is away for a while is not: requests are
        served without it."""
        reasons = [] if self.runner is not None else ["the engine is starting"]
        if self._pool is not None and not self._pool.incarnation:
            reasons.append(f"no pool at {self._pool.path}")
        return reasons

    def routes(self) -> list[BaseRoute]:
        return self._routes()

    async def drain(self) -> None:
        """Give back what waits, let what runs end."""
        if self.runner is not None:
            await self.runner.drain()

    async def stop(self) -> None:
        await self._backend.stop()

    # Messages

    def _decoded(self, decoder: Decoder[MessageT], delivery: Delivery) -> MessageT | RejectedMessage:
        """The message, or the reason (counted and logged) why it is none."""
        try:
            return decoder.decode(delivery.data)
        except RejectedMessage as error:
            kind = decoder.kind.__name__
            self._metrics.rejected.labels(kind, error.reason).inc()
            self._log.warning("message_rejected", kind=kind, subject=delivery.subject, error=str(error))
            return error

    async def _on_serve(self, delivery: Delivery) -> bytes:
        request = self._decoded(SERVE_REQUEST, delivery)
        if isinstance(request, ServeRequest):
            return encode(self._working.serve(request))
        return encode(ServeReply(accepted=False, epoch=self._core.switch.epoch, reason="schema", text=str(request)))

    async def _on_handoff(self, delivery: Delivery) -> bytes:
        message = self._decoded(HANDOFF, delivery)
        if isinstance(message, Handoff):
            return encode(self._working.handoff(message))
        return encode(HandoffReply(granted=False, reason="unknown"))

    async def _on_cancel(self, delivery: Delivery) -> bytes:
        request = self._decoded(CANCEL_REQUEST, delivery)
        if isinstance(request, CancelRequest):
            return encode(self._working.cancel(request))
        return encode(CancelReply(known=False))

    async def _on_resend(self, delivery: Delivery) -> bytes:
        request = self._decoded(RESEND_REQUEST, delivery)
        update = None
        if isinstance(request, ResendRequest):
            update = self._working.resend(LegKey(request.id, request.attempt, request.phase), request.seq)
        batch = ReplyBatch(
            node=self._identity.node,
            incarnation=self._identity.incarnation,
            t=self._app.clock.wall(),
            updates=[] if update is None else [update],
        )
        return encode(batch)

    async def _on_command(self, delivery: Delivery) -> None:
        command = self._decoded(PHASE_COMMAND, delivery)
        if not isinstance(command, RejectedMessage):
            self._working.command(command)

    async def _on_router(self, delivery: Delivery) -> None:
        message = self._decoded(ROUTER_TELEMETRY, delivery)
        if not isinstance(message, RejectedMessage):
            self._core.routers.seen(message.router, message.incarnation, self._app.clock.now())

    async def _on_node(self, delivery: Delivery) -> None:
        if parse(delivery.subject).entity == self._identity.node:
            return
        message = self._decoded(NODE_TELEMETRY, delivery)
        if not isinstance(message, RejectedMessage):
            self._core.nodes.seen(message.node, message.engine_incarnation, self._app.clock.now())

    async def _on_who(self, _: Delivery) -> None:
        await self._reports.asked()

    @property
    def _working(self) -> Runner:
        assert self.runner is not None
        return self.runner
