"""The planner as a service: nodes that obey, orders that are answered with what they cost, restarts."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from schemas.codec import encode
from schemas.phase import (
    DECISION,
    PHASE_COMMAND,
    PLANNER_REPLY,
    Decision,
    Phase,
    PhaseState,
    PlannerQuery,
    PlannerReply,
    SwitchState,
)
from schemas.subjects import Subjects
from schemas.telemetry import KvUse, NodeTelemetry, RequestTelemetry, TierUse
from services.app import serve
from services.bus import Bus, Delivery
from services.planner.service import PlannerService
from services.planner.settings import PlannerServiceSettings

Connect = Callable[[], Awaitable[Bus]]
SUBJECTS = Subjects()
USE = TierUse(used=0, total=100)


class Node:
    """A node that follows its commands and reports; `drain_s` is how long its old phase takes to end."""

    def __init__(self, bus: Bus, name: str, phase: Phase, drain_s: float = 0.0) -> None:
        self.bus, self.name, self.phase, self.drain_s = bus, name, phase, drain_s
        self.epoch = 0
        self.commands: list[tuple[Phase, int]] = []
        self.obeyed = asyncio.Event()

    async def start(self) -> None:
        await self.bus.follow(SUBJECTS.phase_command(self.name), self._obey, start="last_per_subject")
        await self.report()

    async def report(self) -> None:
        beat = NodeTelemetry(
            node=self.name,
            t=0.0,
            incarnation=1,
            phase=self.phase,
            epoch=self.epoch,
            waiting=0,
            running=0,
            kv=KvUse(l1=USE, l2=USE),
            last_kv_seq=0,
            engine_incarnation=1,
        )
        await self.bus.publish(SUBJECTS.telemetry_node(self.name), encode(beat))

    async def _obey(self, delivery: Delivery) -> None:
        command = PHASE_COMMAND.decode(delivery.data)
        if command.epoch <= self.epoch:
            return
        self.commands.append((command.phase, command.epoch))
        self.obeyed.set()
        self.phase, self.epoch = command.phase, command.epoch
        await self.report()
        await asyncio.sleep(self.drain_s)
        state = PhaseState(
            id="s",
            t=0.0,
            node=self.name,
            phase=self.phase,
            epoch=self.epoch,
            state=SwitchState.SWITCHED,
            took_s=self.drain_s,
            moved=2,
        )
        await self.bus.publish(SUBJECTS.phase_state(self.name), encode(state))


@asynccontextmanager
async def planner(bus: Bus, **settings: float) -> AsyncIterator[None]:
    stop, started = asyncio.Event(), asyncio.Event()
    chosen = PlannerServiceSettings(settle_s=0.05, debug_checks=True, **settings)  # type: ignore[arg-type]  # all floats
    running = asyncio.create_task(serve(PlannerService, chosen, stop=stop, bus=bus, started=lambda _: started.set()))
    await asyncio.wait({running, asyncio.ensure_future(started.wait())}, return_when=asyncio.FIRST_COMPLETED)
    try:
        yield
    finally:
        stop.set()
        await running


async def ask(bus: Bus, verb: str, query: PlannerQuery | None = None) -> PlannerReply:
    data = encode(query or PlannerQuery())
    return PLANNER_REPLY.decode(await bus.request(SUBJECTS.query_planner(verb), data, 10))


async def nodes_known(bus: Bus, split: str) -> None:
    for _ in range(500):
        if (await ask(bus, "status")).split_now == split:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"split {split} was not seen")


async def three(connect: Connect, drain_s: float = 0.0) -> list[Node]:
    phases = {"node-0": Phase.PREFILL, "node-1": Phase.PREFILL, "node-2": Phase.DECODE}
    return [Node(await connect(), name, phase, drain_s) for name, phase in phases.items()]


async def test_a_split_order_is_answered_when_its_switch_is_over(connect: Connect) -> None:
    bus = await connect()
    async with planner(await connect()):
        nodes = await three(connect, drain_s=0.1)
        for node in nodes:
            await node.start()
        await nodes_known(bus, "2P1D")
        reply = await ask(bus, "split", PlannerQuery(split="1p2d"))
        assert (reply.ok, reply.error, reply.split_now, reply.moved) == (True, "", "1P2D", 2)
        assert [(n.node, n.old, n.new, n.epoch, n.took_s) for n in reply.nodes] == [
            ("node-0", Phase.PREFILL, Phase.DECODE, 1, 0.1)
        ]
        assert reply.took_s is not None
        assert reply.took_s >= 0.1
        assert nodes[0].commands == [(Phase.DECODE, 1)]
        again = await ask(bus, "split", PlannerQuery(split="1P2D"))
        assert (again.ok, again.nodes) == (True, [])


async def test_an_endless_reason_is_refused(connect: Connect) -> None:
    bus = await connect()
    async with planner(await connect()):
        reply = await ask(bus, "split", PlannerQuery(split="1P2D", reason="x" * 1001))
        assert (reply.ok, reply.error) == (False, "reason has 1001 characters, the limit is 1000")


async def test_what_was_lost_during_the_switch_is_in_the_reply(connect: Connect) -> None:
    bus = await connect()
    async with planner(await connect()):
        nodes = await three(connect, drain_s=0.3)
        for node in nodes:
            await node.start()
        await nodes_known(bus, "2P1D")
        order = asyncio.create_task(ask(bus, "phase", PlannerQuery(node="node-1", phase=Phase.DECODE)))
        await asyncio.wait_for(nodes[1].obeyed.wait(), 5)
        assert (await ask(bus, "status")).open_orders == 1
        for outcome in ("ok", "error"):
            record = RequestTelemetry(
                id=outcome,
                t=0.0,
                request=outcome,
                branch=None,
                version=None,
                outcome=outcome,
                t_arrive=0.0,
                t_end=0.0,
                prompt_tokens=100,
                cached_tokens=48,
                ideal_tokens=96,
                output_tokens=1,
            )
            await bus.publish(SUBJECTS.telemetry_request("node-1"), encode(record))
        reply = await order
        assert (reply.lost_tokens, reply.failed) == (48, 1)


@pytest.mark.parametrize(
    ("verb", "query", "text"),
    [
        ("split", PlannerQuery(split="0P3D"), "split 0P3D leaves a phase without a node"),
        ("split", PlannerQuery(split="nonsense"), "split 'nonsense' is not of the form 4P5D"),
        ("split", PlannerQuery(), "a split query needs `split`"),
        ("phase", PlannerQuery(node="node-2", phase=Phase.PREFILL), "node 'node-2' is the last that serves decode"),
        ("pin", PlannerQuery(node="nobody", pinned=True), "node 'nobody' is not live"),
        ("mode", PlannerQuery(mode="sideways"), "mode 'sideways' is none of on, off, dry-run"),
    ],
)
async def test_refused_orders_say_why_and_command_nothing(
    connect: Connect, verb: str, query: PlannerQuery, text: str
) -> None:
    bus = await connect()
    async with planner(await connect()):
        nodes = await three(connect)
        for node in nodes:
            await node.start()
        await nodes_known(bus, "2P1D")
        reply = await ask(bus, verb, query)
        assert not reply.ok
        assert reply.error.startswith(text) or text in reply.error
        assert all(node.commands == [] for node in nodes)


async def test_a_query_that_cannot_be_read_is_answered(connect: Connect) -> None:
    bus = await connect()
    async with planner(await connect()):
        reply = PLANNER_REPLY.decode(await bus.request(SUBJECTS.query_planner("split"), b"\xc1", 5))
        assert not reply.ok
        assert "PlannerQuery" in reply.error


async def test_a_planner_started_again_knows_pins_and_epochs(connect: Connect) -> None:
    bus = await connect()
    nodes = await three(connect)
    async with planner(await connect()):
        for node in nodes:
            await node.start()
        await nodes_known(bus, "2P1D")
        assert (await ask(bus, "pin", PlannerQuery(node="node-0", pinned=True))).pinned == ["node-0"]
        assert (await ask(bus, "split", PlannerQuery(split="1P2D"))).nodes[0].node == "node-1"
    async with planner(await connect()):
        for node in nodes:
            await node.report()
        await nodes_known(bus, "1P2D")
        assert (await ask(bus, "status")).pinned == ["node-0"]
        back = await ask(bus, "phase", PlannerQuery(node="node-1", phase=Phase.PREFILL))
        assert [(n.node, n.epoch) for n in back.nodes] == [("node-1", 2)]


async def test_decisions_are_published_with_their_reasons(connect: Connect) -> None:
    bus = await connect()
    seen: list[Decision] = []
    stored = asyncio.Event()

    async def keep(delivery: Delivery) -> None:
        seen.append(DECISION.decode(delivery.data))
        stored.set()

    async with planner(await connect()):
        nodes = await three(connect)
        for node in nodes:
            await node.start()
        await nodes_known(bus, "2P1D")
        await ask(bus, "split", PlannerQuery(split="1P2D", reason="a test"))
        await bus.follow(SUBJECTS.planner_decision(), keep, start="all")
        await asyncio.wait_for(stored.wait(), 5)
    assert [(d.split_now, d.split_new, d.applied, d.why, d.nodes) for d in seen] == [
        ("2P1D", "1P2D", True, "a test", ["node-0"])
    ]
