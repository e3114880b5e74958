"""Orders and questions at `query.planner.<verb>`: what is done about them, and what the reply says."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable

import msgspec

from schemas.codec import RejectedMessage, encode
from schemas.phase import PLANNER_QUERY, Decision, PhaseCommand, PlannerQuery, PlannerReply, Split
from schemas.subjects import Subjects
from services.app import App
from services.bus import BusError, Delivery
from services.planner.core.explain import decision_of
from services.planner.core.moves import Refused
from services.planner.core.policy import Decided, Order, Planner
from services.planner.core.switches import Switch
from services.planner.metrics import PlannerMetrics
from services.planner.settings import PlannerServiceSettings

MAX_REASON_CHARACTERS = 1000


class Orders:
    """Carries orders out and answers when their switch is over. `own`: ids of the decisions made here."""

    def __init__(
        self,
        app: App[PlannerServiceSettings],
        core: Planner,
        metrics: PlannerMetrics,
        changed: Callable[[], None],
    ) -> None:
        self._app, self._core, self._metrics, self._changed = app, core, metrics, changed
        self._subjects = Subjects(app.settings.partition)
        self._waiting: dict[str, asyncio.Future[Switch]] = {}
        self._last: Switch | None = None
        self.own: set[str] = set()

    async def start(self) -> None:
        """Answer from now on."""
        answers: dict[str, Callable[[PlannerQuery], Awaitable[PlannerReply]]] = {
            "split": self._split,
            "phase": self._phase,
            "pin": self._pin,
            "mode": self._mode,
            "status": self._status,
        }
        for verb, answer in answers.items():
            await self._app.bus.respond(self._subjects.query_planner(verb), self._responder(verb, answer))

    def ended(self, switch: Switch) -> None:
        """Tell whoever ordered this switch."""
        self._last = switch
        waiting = self._waiting.pop(switch.decision_id, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(switch)

    def abandon(self) -> None:
        """Commands are in the stream and are carried out without us: nobody is kept waiting."""
        for waiting in self._waiting.values():
            waiting.cancel()

    def _responder(
        self, verb: str, answer: Callable[[PlannerQuery], Awaitable[PlannerReply]]
    ) -> Callable[[Delivery], Awaitable[bytes]]:
        async def respond(delivery: Delivery) -> bytes:
            try:
                query = PLANNER_QUERY.decode(delivery.data)
                _check_reason(query.reason)
                reply = await answer(query)
            except (RejectedMessage, Refused, ValueError) as error:
                self._metrics.refused.labels(verb).inc()
                reply = self._reply(error=str(error))
            return encode(reply)

        return respond

    async def carry_out(self, decided: Decided) -> None:
        """A decision of the planner's own: its commands, then itself; BusError when they cannot be sent."""
        if decided.order is not None:
            self._changed()
            try:
                await self._command(decided.order, decided.decision.why)
            except BusError as error:
                self._core.withdraw(decided.order, f"command not delivered: {error}", self._app.clock.now())
                raise
        await self._publish(decided.decision)

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
        await self._decide(_new_id(), None, why, "pin")
        return self._reply()

    async def _mode(self, query: PlannerQuery) -> PlannerReply:
        if query.mode is None:
            raise Refused("a mode query needs `mode`: on, off or dry-run")
        self._core.set_mode(query.mode)
        await self._decide(_new_id(), None, f"mode {query.mode}: {query.reason}", "mode")
        return self._reply()

    async def _status(self, query: PlannerQuery) -> PlannerReply:
        """The split now, and the last switch that was carried out here."""
        return self._reply(self._last)

    async def _ordered(self, make: Callable[[str, float], Order], why: str) -> PlannerReply:
        """Command the nodes and wait until the last of them has switched; what it cost is in the reply."""
        order = make(_new_id(), self._app.clock.now())
        if not order.commands:
            await self._decide(order.decision_id, order, f"{why}: {order.split_now} already")
            return self._reply(decision_id=order.decision_id)
        waiting: asyncio.Future[Switch] = asyncio.get_running_loop().create_future()
        self._waiting[order.decision_id] = waiting
        self._changed()
        try:
            await self._command(order, why)
            await self._decide(order.decision_id, order, why)
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

    async def _decide(self, key: str, order: Order | None, why: str, kind: str = "hand") -> None:
        """Publish what was ordered by hand; an order without commands changes nothing."""
        decision = decision_of(
            key,
            kind,
            why,
            self._core.standing(),
            split_now=str(self._core.fleet.split()) if order is None else order.split_now,
            split_new=None if order is None or not order.commands else order.split_new,
            order=order,
        )
        applied = order is None or bool(order.commands)
        await self._publish(msgspec.structs.replace(decision, applied=applied))

    async def _publish(self, decision: Decision) -> None:
        self.own.add(decision.id)
        message = msgspec.structs.replace(decision, t=self._app.clock.wall())
        await self._app.bus.store(self._subjects.planner_decision(), encode(message), message.id)

    def _reply(self, switch: Switch | None = None, *, error: str = "", decision_id: str = "") -> PlannerReply:
        reply = PlannerReply(
            ok=not error,
            error=error,
            split_now=str(self._core.fleet.split()),
            mode=self._core.mode,
            pinned=sorted(self._core.pinned),
            decision_id=decision_id,
            open_orders=len(self._waiting),
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


def _check_reason(reason: str) -> None:
    """A reason is stored with the decision and shown to whoever asks."""
    if len(reason) > MAX_REASON_CHARACTERS:
        raise Refused(f"reason has {len(reason)} characters, the limit is {MAX_REASON_CHARACTERS}")


def _new_id() -> str:
    return uuid.uuid4().hex
