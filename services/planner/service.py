"""`ei-planner`: hears heartbeats and finished requests, takes orders, commands phases, publishes decisions."""

import asyncio
import uuid
from collections.abc import Callable
from typing import TypeVar

from starlette.routing import BaseRoute

from schemas.codec import RejectedMessage, encode
from schemas.iteration_model import IterationModel, PlannerModels
from schemas.kv import NODE_HELLO
from schemas.phase import (
    DECISION,
    PHASE_COMMAND,
    PHASE_STATE,
)
from schemas.streams import phase_stream, planner_stream
from schemas.subjects import Subjects
from schemas.telemetry import ITERATION_BATCH, NODE_TELEMETRY, REQUEST_TELEMETRY, ROUTER_TELEMETRY
from services.app import App
from services.bus import BusError, Delivery
from services.observe import RateLimitedLog
from services.planner.core.policy import Decided, Planner
from services.planner.core.switches import Switch
from services.planner.core.windows import SliceKind
from services.planner.metrics import PlannerMetrics
from services.planner.orders import Orders
from services.planner.settings import PlannerServiceSettings

T = TypeVar("T")
TICK_S = 0.05
"""How often time passes for the core while a switch is under way; otherwise every `IDLE_TICK_S`."""
IDLE_TICK_S = 0.5


class PlannerService:
    """Decode, core, perform. Orders by hand are answered when their switch is over; the planner's own decisions are
    carried out and published one after the other."""

    def __init__(self, app: App[PlannerServiceSettings]) -> None:
        self._app = app
        self._subjects = Subjects(app.settings.partition)
        self._core = Planner(app.settings.policy(), app.clock.now(), f"{app.settings.name}-{uuid.uuid4().hex[:12]}")
        self._metrics = PlannerMetrics(app.metrics)
        self._rare = RateLimitedLog(app.log, app.clock)
        self._wake = asyncio.Event()
        self._decided: asyncio.Queue[Decided] = asyncio.Queue()
        self._models: list[IterationModel] | None = None
        self._was_warming_up = True
        self._orders = Orders(app, self._core, self._metrics, self._wake.set)

    async def start(self) -> None:
        """Take over from the streams what a planner before us left, then listen and answer."""
        bus, subjects, anyone = self._app.bus, self._subjects, Subjects.ANY
        for stream in (phase_stream(subjects), planner_stream(subjects)):
            await bus.ensure_stream(
                stream.name, stream.subjects, max_age_s=stream.max_age_s, last_per_subject=stream.last_per_subject
            )
        await bus.follow(subjects.planner_decision(), self._on_decision, start="last_per_subject")
        await bus.follow(subjects.phase_command(anyone), self._on_command, start="last_per_subject")
        await bus.subscribe(subjects.telemetry_node(anyone), self._on_node)
        await bus.subscribe(subjects.telemetry_router(anyone), self._on_router)
        await bus.subscribe(subjects.telemetry_request(anyone), self._on_request)
        await bus.subscribe(subjects.telemetry_iteration(anyone), self._on_iterations)
        await bus.subscribe(subjects.phase_state(anyone), self._on_phase_state)
        await bus.subscribe(subjects.node_hello(anyone), self._on_hello)
        await bus.publish(subjects.node_hello_query(), b"")
        await self._orders.start()
        self._app.tasks.create_task(self._ticks(), name="planner ticks")
        self._app.tasks.create_task(self._decisions(), name="decisions")

    def not_ready(self) -> list[str]:
        return []

    def routes(self) -> list[BaseRoute]:
        return []

    async def drain(self) -> None:
        """Nodes carry out what is commanded without us."""
        self._orders.abandon()

    async def stop(self) -> None:
        """Nothing is held."""

    async def _on_node(self, delivery: Delivery) -> None:
        if (beat := self._decoded(NODE_TELEMETRY.decode, delivery)) is not None:
            self._core.heard(beat, self._app.clock.now())

    async def _on_router(self, delivery: Delivery) -> None:
        if (beat := self._decoded(ROUTER_TELEMETRY.decode, delivery)) is not None:
            self._core.router_heard(beat.router, self._app.clock.now())

    async def _on_request(self, delivery: Delivery) -> None:
        if (record := self._decoded(REQUEST_TELEMETRY.decode, delivery)) is not None:
            self._core.request_ended(record, self._app.clock.now())

    async def _on_iterations(self, delivery: Delivery) -> None:
        if (batch := self._decoded(ITERATION_BATCH.decode, delivery)) is not None:
            self._core.iterations(batch, self._app.clock.now())

    async def _on_hello(self, delivery: Delivery) -> None:
        if (hello := self._decoded(NODE_HELLO.decode, delivery)) is not None:
            self._core.hello(hello)

    async def _on_phase_state(self, delivery: Delivery) -> None:
        if (state := self._decoded(PHASE_STATE.decode, delivery)) is not None:
            self._core.phase_state(state, self._app.clock.now())
            self._wake.set()

    async def _on_command(self, delivery: Delivery) -> None:
        if (command := self._decoded(PHASE_COMMAND.decode, delivery)) is not None:
            self._core.command_seen(command, self._app.clock.now())
            self._wake.set()

    async def _on_decision(self, delivery: Delivery) -> None:
        decision = self._decoded(DECISION.decode, delivery)
        if decision is not None and decision.id not in self._orders.own:
            self._core.decision_seen(decision, self._app.clock.now())

    def _decoded(self, decode: Callable[[bytes], T], delivery: Delivery) -> T | None:
        try:
            return decode(delivery.data)
        except RejectedMessage as rejected:
            self._metrics.rejected.labels(rejected.reason).inc()
            self._rare.warning("rejected", kind=rejected.reason, subject=delivery.subject, error=str(rejected))
            return None

    async def _ticks(self) -> None:
        while True:
            self._tick()
            await self._publish_models()
            busy = bool(self._core.switches.open)
            try:
                async with asyncio.timeout(TICK_S if busy else IDLE_TICK_S):
                    await self._wake.wait()
            except TimeoutError:
                continue
            self._wake.clear()

    def _tick(self) -> None:
        report = self._core.tick(self._app.clock.now())
        for switch in report.switches:
            self._finished(switch)
        for node in report.silent:
            self._app.log.warning("node_silent", node=node, after_s=self._app.settings.node_timeout_s)
        for window in report.windows:
            for one in window:
                self._metrics.slices.labels(one.kind.value).inc()
            if all(one.kind is SliceKind.UNKNOWN for one in window):
                self._app.log.warning("window_unknown", slices=len(window))
        for decided in report.decided:
            self._decided.put_nowait(decided)
        self._models = report.models or self._models
        if self._was_warming_up and not self._core.models.warming_up:
            self._was_warming_up = False
            self._warm_up_ended()
        self._metrics.show(self._core, report.models or [])
        if self._app.settings.debug_checks:
            self._core.check()

    def _warm_up_ended(self) -> None:
        late, took_s = self._core.models.late, self._core.models.warm_up_s(self._app.clock.now())
        say = self._app.log.warning if late else self._app.log.info
        say("models_frozen", after_s=round(took_s, 1), within_target=not late)

    async def _decisions(self) -> None:
        """Carry out and publish what was decided; a broker that is away loses the decision, not the planner."""
        while True:
            decided = await self._decided.get()
            decision = decided.decision
            try:
                await self._orders.carry_out(decided)
            except BusError as error:
                self._rare.warning("decision_lost", kind=decision.kind, decision=decision.id, error=str(error))
                continue
            self._metrics.decided(decision)
            new, why = decision.split_new, decision.why
            self._app.log.info("decided", kind=decision.kind, split=decision.split_now, new=new, why=why)

    async def _publish_models(self) -> None:
        """Routers predict with them; telemetry, so lost ones are not repeated."""
        if self._models is None:
            return
        core, settings, now = self._core, self._app.settings, self._app.clock.now()
        message = PlannerModels(
            id=uuid.uuid4().hex,
            t=self._app.clock.wall(),
            models=self._models,
            warming_up=core.models.warming_up,
            warm_up_s=core.models.warm_up_s(now),
            target_error=settings.model.target_error,
        )
        self._models = None
        try:
            await self._app.bus.publish(self._subjects.planner_models(), encode(message))
        except BusError as error:
            self._rare.warning("not_published", kind="models", error=str(error))

    def _finished(self, switch: Switch) -> None:
        self._metrics.switched(switch)
        self._app.log.info(
            "switch_ended",
            decision=switch.decision_id,
            nodes=sorted(switch.parts),
            took_s=switch.took_s,
            lost_tokens=switch.lost_tokens,
            failed=switch.failed,
            problems=switch.problems,
        )
        self._orders.ended(switch)
