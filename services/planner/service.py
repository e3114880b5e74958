"""`ei-planner`: hears heartbeats and finished requests, takes orders, commands phases, publishes decisions."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from starlette.routing import BaseRoute

from schemas.codec import RejectedMessage, encode
from schemas.kv import NODE_HELLO
from schemas.phase import (
    DECISION,
    PHASE_COMMAND,
    PHASE_STATE,
    PLANNER_QUERY,
    Decision,
    PhaseCommand,
    PlannerQuery,
    PlannerReply,
    Split,
)
from schemas.streams import phase_stream, planner_stream
from schemas.subjects import Subjects
from schemas.telemetry import ITERATION_BATCH, NODE_TELEMETRY, REQUEST_TELEMETRY, ROUTER_TELEMETRY
from services.app import App
from services.bus import BusError, Delivery
from services.observe import RateLimitedLog
from services.planner.core.moves import Refused
from services.planner.core.policy import Order, Planner
from services.planner.core.switches import Switch
from services.planner.core.windows import SliceKind
from services.planner.metrics import PlannerMetrics
from services.planner.settings import PlannerServiceSettings

T = TypeVar("T")
TICK_S = 0.05
"""How often time passes for the core while a switch is under way; otherwise every `IDLE_TICK_S`."""
IDLE_TICK_S = 0.5


class PlannerService:
    """Decode, core, perform. Orders by hand are answered when their switch is over."""

    def __init__(self, app: App[PlannerServiceSettings]) -> None:
        self._app = app
        self._subjects = Subjects(app.settings.partition)
        self._core = Planner(app.settings.policy(), app.clock.now())
        self._metrics = PlannerMetrics(app.metrics)
        self._rare = RateLimitedLog(app.log, app.clock)
        self._waiting: dict[str, asyncio.Future[Switch]] = {}
        self._own: set[str] = set()
        self._last: Switch | None = None
        self._wake = asyncio.Event()

    async def start(self) -> None:
        """Take over from the streams what a planner before us left, then listen and answer."""
        bus, subjects, anyone = self._app.bus, self._subjects, Subjects.ANY
        for stream in (phase_stream(subjects.partition), planner_stream(subjects.partition)):
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
        answers: dict[str, Callable[[PlannerQuery], Awaitable[PlannerReply]]] = {
            "split": self._split,
            "phase": self._phase,
            "pin": self._pin,
            "mode": self._mode,
            "status": self._status,
        }
        for verb, answer in answers.items():
            await bus.respond(subjects.query_planner(verb), self._responder(verb, answer))
        self._app.tasks.create_task(self._ticks(), name="planner ticks")

    def not_ready(self) -> list[str]:
        return []

    def routes(self) -> list[BaseRoute]:
        return []

    async def drain(self) -> None:
        """Commands are in the stream: nodes carry them out without us, so nobody is kept waiting."""
        for waiting in self._waiting.values():
            waiting.cancel()

    async def stop(self) -> None:
        """Nothing is held."""

    # -- what arrives

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
            self._core.block_size(hello.block_size)

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
        if decision is not None and decision.id not in self._own:
            self._core.decision_seen(decision)

    def _decoded(self, decode: Callable[[bytes], T], delivery: Delivery) -> T | None:
        try:
            return decode(delivery.data)
        except RejectedMessage as rejected:
            self._metrics.rejected.labels(rejected.reason).inc()
            self._rare.warning("rejected", kind=rejected.reason, subject=delivery.subject, error=str(rejected))
            return None

    # -- what is asked

    def _responder(
        self, verb: str, answer: Callable[[PlannerQuery], Awaitable[PlannerReply]]
    ) -> Callable[[Delivery], Awaitable[bytes]]:
        async def respond(delivery: Delivery) -> bytes:
            try:
                query = PLANNER_QUERY.decode(delivery.data)
                reply = await answer(query)
            except (RejectedMessage, Refused, ValueError) as error:
                self._metrics.refused.labels(verb).inc()
                reply = self._reply(error=str(error))
            return encode(reply)

        return respond

    async def _split(self, query: PlannerQuery) -> PlannerReply:
        if query.split is None:
            raise Refused("a split query needs `split`, such as 2P1D")
        target = Split.parse(query.split)
        return await self._ordered(lambda key, now: self._core.order_split(target, key, now), query.reason)

    async def _phase(self, query: PlannerQuery) -> PlannerReply:
        if query.node is None or query.phase is None:
            raise Refused("a phase query needs `node` and `phase`")
        node, phase = query.node, query.phase
        return await self._ordered(lambda key, now: self._core.order_phase(node, phase, key, now), query.reason)

    async def _pin(self, query: PlannerQuery) -> PlannerReply:
        if query.node is None or query.pinned is None:
            raise Refused("a pin query needs `node` and `pinned`")
        self._core.pin(query.node, pinned=query.pinned)
        why = f"{'pinned' if query.pinned else 'unpinned'} {query.node}: {query.reason}"
        await self._decide(_new_id(), None, why)
        return self._reply()

    async def _mode(self, query: PlannerQuery) -> PlannerReply:
        if query.mode is None:
            raise Refused("a mode query needs `mode`: on, off or dry-run")
        self._core.set_mode(query.mode)
        await self._decide(_new_id(), None, f"mode {query.mode}: {query.reason}")
        return self._reply()

    async def _status(self, query: PlannerQuery) -> PlannerReply:
        """The split now, and the last switch that was carried out here."""
        return self._reply(self._last)

    async def _ordered(self, make: Callable[[str, float], Order], why: str) -> PlannerReply:
        """Command the nodes and wait until the last of them has switched; what it cost is in the reply."""
        order = make(_new_id(), self._app.clock.now())
        if not order.commands:
            await self._decide(order.decision_id, order, f"{why}: {order.split_now} already", applied=False)
            return self._reply(decision_id=order.decision_id)
        waiting: asyncio.Future[Switch] = asyncio.get_running_loop().create_future()
        self._waiting[order.decision_id] = waiting
        self._wake.set()
        try:
            await self._command(order, why)
            await self._decide(order.decision_id, order, why, applied=True)
        except BusError as error:
            self._core.withdraw(order, f"command not delivered: {error}", self._app.clock.now())
        return self._reply(await waiting)

    async def _command(self, order: Order, why: str) -> None:
        """Store one command per node; its message id lets the broker keep one per node and epoch."""
        for command in order.commands:
            message = PhaseCommand(
                id=f"{command.node}.{command.epoch}",
                t=self._app.clock.wall(),
                node=command.node,
                phase=command.phase,
                epoch=command.epoch,
                reason=why,
                decision_id=order.decision_id,
            )
            await self._app.bus.store(self._subjects.phase_command(command.node), encode(message), message.id)

    async def _decide(self, key: str, order: Order | None, why: str, *, applied: bool = True) -> None:
        self._own.add(key)
        split = str(self._core.fleet.split())
        decision = Decision(
            id=key,
            t=self._app.clock.wall(),
            split_now=split if order is None else order.split_now,
            split_new=None if order is None or not order.commands else order.split_new,
            workload=None if order is None else order.workload,
            q=None if order is None else order.q,
            applied=applied,
            why=why,
            nodes=[] if order is None else [command.node for command in order.commands],
            pinned=sorted(self._core.pinned),
            mode=self._core.mode,
        )
        await self._app.bus.store(self._subjects.planner_decision(), encode(decision), key)

    def _reply(self, switch: Switch | None = None, *, error: str = "", decision_id: str = "") -> PlannerReply:
        reply = PlannerReply(
            ok=not error,
            error=error,
            split_now=str(self._core.fleet.split()),
            mode=self._core.mode,
            pinned=sorted(self._core.pinned),
            decision_id=decision_id,
        )
        if switch is None:
            return reply
        return msgspec.structs.replace(
            reply,
            ok=not switch.problems,
            error="; ".join(switch.problems),
            decision_id=switch.decision_id,
            nodes=switch.nodes(),
            took_s=switch.took_s,
            moved=switch.moved,
            lost_tokens=switch.lost_tokens,
            failed=switch.failed,
        )

    # -- time

    async def _ticks(self) -> None:
        while True:
            self._tick()
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
        self._metrics.show(self._core)
        if self._app.settings.debug_checks:
            self._core.check()

    def _finished(self, switch: Switch) -> None:
        self._last = switch
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
        waiting = self._waiting.pop(switch.decision_id, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(switch)


def _new_id() -> str:
    return uuid.uuid4().hex
