"""Engine services in one event loop, with the part of a router: what the engine's integration tests share."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schemas.block_key import token_bytes, token_list
from schemas.codec import encode
from schemas.phase import PHASE_STATE, Phase, PhaseCommand, PhaseState, SwitchState
from schemas.serve import (
    CANCEL_REPLY,
    REPLY_BATCH,
    SERVE_REPLY,
    CancelRequest,
    FetchSource,
    Finish,
    LegUpdate,
    RequestState,
    Sampling,
    ServeReply,
    ServeRequest,
)
from schemas.streams import phase_stream
from schemas.subjects import Subjects
from schemas.telemetry import RouterTelemetry
from services.app import App, serve
from services.bus import Bus, Delivery
from services.engine.__main__ import build
from services.engine.core.timing import PRESETS, PrefillTime
from services.engine.node_pool import NodePool
from services.engine.service import EngineService
from services.engine.settings import EngineSettings
from services.engine.timed.backend import TimedBackend
from services.engine.timed.pace import Sleep
from services.engine.timed.settings import TimedSettings
from services.engine.timed.store import ArenaBlocks, BlockStore, NoBlocks
from services.kvpool.service import KvPool
from services.kvpool.settings import KvPoolSettings

S = Subjects()
ROUTER = "r0"
Connect = Callable[[], Awaitable[Bus]]


async def until(condition: Callable[[], bool], limit_s: float = 5.0) -> float:
    """Wait for a condition; returns the seconds it took. AssertionError after `limit_s`."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    while not condition():
        assert loop.time() - start < limit_s, f"not within {limit_s} s"
        await asyncio.sleep(0.005)
    return loop.time() - start


@dataclass
class Leg:
    """What a router knows of one leg."""

    states: list[RequestState] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    end: LegUpdate | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def finish(self) -> Finish | None:
        return self.end.finish if self.end else None


class FakeRouter:
    """Places requests by hand and collects what comes back; sends a heartbeat until told not to."""

    def __init__(self, bus: Bus, name: str = ROUTER) -> None:
        self.bus, self.name = bus, name
        self.legs: dict[tuple[str, int, Phase], Leg] = {}
        self.phases: list[PhaseState] = []
        self.beating = True
        self._rooms = itertools.count(1)

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        await self.bus.subscribe(S.reply(self.name), self._on_reply)
        await self.bus.subscribe(S.phase_state(S.ANY), self._on_phase)
        tasks.create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            if self.beating:
                message = RouterTelemetry(router=self.name, t=0.0, incarnation=1, open_requests=0)
                await self.bus.publish(S.telemetry_router(self.name), encode(message))
            await asyncio.sleep(0.3)

    async def _on_reply(self, delivery: Delivery) -> None:
        for update in REPLY_BATCH.decode(delivery.data).updates:
            leg = self.leg(update.id, update.attempt, update.phase)
            assert leg.end is None, f"{update} after the end"
            if update.state is not None:
                leg.states.append(update.state)
            if update.tokens:
                assert update.seq == len(leg.tokens), f"{update} after {len(leg.tokens)} tokens"
                leg.tokens += token_list(update.tokens)
            if update.finish is not None:
                assert update.seq == len(leg.tokens)
                leg.end = update
                leg.ended.set()
            leg.changed.set()

    async def _on_phase(self, delivery: Delivery) -> None:
        self.phases.append(PHASE_STATE.decode(delivery.data))

    def leg(self, id: str, attempt: int, phase: Phase) -> Leg:  # noqa: A002
        return self.legs.setdefault((id, attempt, phase), Leg())

    def decode(self, id: str, attempt: int = 1) -> Leg:  # noqa: A002
        return self.leg(id, attempt, Phase.DECODE)

    def prefill(self, id: str, attempt: int = 1) -> Leg:  # noqa: A002
        return self.leg(id, attempt, Phase.PREFILL)

    async def serve(self, node: str, message: ServeRequest) -> ServeReply:
        return SERVE_REPLY.decode(await self.bus.request(S.serve(node), encode(message), 2.0))

    async def place(
        self,
        id: str,  # noqa: A002
        prefill: str,
        decode: str,
        prompt: Sequence[int],
        new: int,
        *,
        attempt: int = 1,
        fetch: Sequence[FetchSource] = (),
        **keys: Any,
    ) -> None:
        """Both legs of one attempt, sent at the same time."""
        room = next(self._rooms)
        legs = [(decode, Phase.DECODE, prefill, []), (prefill, Phase.PREFILL, decode, list(fetch))]
        replies = await asyncio.gather(
            *(
                self.serve(
                    node,
                    ServeRequest(
                        id=id,
                        attempt=attempt,
                        phase=phase,
                        router=self.name,
                        peer=peer,
                        room=room,
                        prompt_tokens=len(prompt),
                        sampling=Sampling(max_new_tokens=new),
                        tokens=token_bytes(prompt),
                        fetch=sources,
                        **keys,
                    ),
                )
                for node, phase, peer, sources in legs
            )
        )
        assert all(reply.accepted for reply in replies), replies

    async def cancel(self, node: str, id: str, attempt: int = 1) -> bool:  # noqa: A002
        data = await self.bus.request(S.cancel(node), encode(CancelRequest(id=id, attempt=attempt)), 2.0)
        return CANCEL_REPLY.decode(data).known

    async def answer(self, id: str, attempt: int = 1, limit_s: float = 10.0) -> list[int]:  # noqa: A002
        """The whole answer, once the decode leg has ended well."""
        leg = self.decode(id, attempt)
        async with asyncio.timeout(limit_s):
            await leg.ended.wait()
        assert leg.finish in (Finish.STOP, Finish.LENGTH), leg.end
        return leg.tokens

    async def command(self, node: str, phase: Phase, epoch: int) -> None:
        stream = phase_stream(S)
        await self.bus.ensure_stream(stream.name, stream.subjects, last_per_subject=True)
        message = PhaseCommand(
            id=f"{node}-{epoch}", t=0.0, node=node, phase=phase, epoch=epoch, reason="test", decision_id=f"d{epoch}"
        )
        await self.bus.store(S.phase_command(node), encode(message), message.id)

    async def switched(self, node: str, epoch: int, limit_s: float = 10.0) -> PhaseState:
        def found() -> list[PhaseState]:
            wanted = (node, epoch, SwitchState.SWITCHED)
            return [state for state in self.phases if (state.node, state.epoch, state.state) == wanted]

        await until(lambda: bool(found()), limit_s)
        return found()[0]


@dataclass
class Running:
    """One service under test, to stop, or to end without a word."""

    service: Any
    bus: Bus
    task: asyncio.Task[None]
    stop: asyncio.Event

    @property
    def engine(self) -> EngineService:
        assert isinstance(self.service, EngineService)
        return self.service

    @property
    def backend(self) -> TimedBackend:
        backend = self.engine._backend
        assert isinstance(backend, TimedBackend)
        return backend

    async def die(self) -> None:
        """As by kill -9: no drain, no word to anybody."""
        await self.bus.close()
        self.task.cancel()
        await asyncio.wait([self.task])

    def assert_empty(self) -> None:
        """As if no request had ever come."""
        runner = self.engine.runner
        assert runner is not None
        runner.core.check()
        assert runner.core.idle(), list(runner.core.table.all())
        assert runner.core.table.pins == {}
        assert runner.core.prefill.asks == {}
        assert self.backend.legs == {}
        self.backend.memory.check()
        assert self.backend.memory.holds == {}
        assert self.backend.memory.device.free_blocks == self.backend.memory.device.capacity


def settings_of(node: str, pool: Path | None = None, **timed: Any) -> EngineSettings:
    """A small node without modelled time unless a preset is named."""
    keys = {"preset": "zero", "block_size": 4, "block_bytes": 256, "l1_tokens": 4096, "max_context_tokens": 2048}
    return EngineSettings(
        node=node,
        pool_socket=str(pool or ""),
        node_timeout_s=timed.pop("node_timeout_s", 10.0),
        router_timeout_s=timed.pop("router_timeout_s", 20.0),
        phase=timed.pop("phase", Phase.BOTH),
        debug_checks=True,
        log_level="warning",
        drain_s=5.0,
        timed=TimedSettings(**{**keys, **timed}),
    )


@asynccontextmanager
async def service(make: Any, settings: Any, bus: Bus) -> AsyncIterator[Running]:
    """One service, started; ended by a drain unless it has died before."""
    stop, started = asyncio.Event(), asyncio.Event()
    built: list[Any] = []

    def capture(app: App[Any]) -> Any:
        built.append(make(app))
        return built[0]

    task = asyncio.create_task(serve(capture, settings, stop=stop, bus=bus, started=lambda _: started.set()))
    waiting = asyncio.create_task(started.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if task.done():
        task.result()
    running = Running(built[0], bus, task, stop)
    try:
        yield running
    finally:
        stop.set()
        if not task.cancelled():
            await task


class Cluster:
    """Engines, and pools where wanted, on one broker."""

    def __init__(self, connect: Connect, stack: AsyncExitStack, path: Path) -> None:
        self.connect, self.path = connect, path
        self._stack = stack
        self.engines: dict[str, Running] = {}
        self.pools: dict[str, Running] = {}
        self.router: FakeRouter

    async def engine(self, node: str, *, pool: bool = False, make: Any = build, **timed: Any) -> Running:
        """Start the engine of a node, with a pool first if wanted."""
        socket = self.path / f"{node}.sock"
        if pool:
            await self.pool(node, socket)
        settings = settings_of(node, socket if pool else None, **timed)
        running = await self._stack.enter_async_context(service(make, settings, await self.connect()))
        self.engines[node] = running
        if pool:
            await until(lambda: running.engine.not_ready() == [])
        return running

    async def pool_free(self, node: str) -> bool:
        """Whether nothing is pinned or leased in the pool of a node."""
        pool = self.engines[node].engine._pool
        status = await pool.status() if pool is not None else None
        return status is not None and status.pinned_blocks == 0 and status.leases == 0

    async def assert_as_before(self, limit_s: float = 1.0) -> None:
        """Within `limit_s` everything is as if no request had ever come."""
        for node, running in self.engines.items():
            runner = running.engine.runner
            assert runner is not None
            await until(lambda r=runner, b=running.backend: r.core.idle() and not b.legs, limit_s)
            running.assert_empty()
            if node in self.pools:
                loop = asyncio.get_running_loop()
                limit = loop.time() + limit_s
                while not await self.pool_free(node):
                    assert loop.time() < limit, f"pins or leases are left in the pool of {node}"
                    await asyncio.sleep(0.01)

    async def pool(self, node: str, socket: Path) -> Running:
        settings = KvPoolSettings(
            node=node,
            model="timed",
            block_size=4,
            block_bytes=256,
            capacity_blocks=4096,
            arena=str(self.path / f"{node}.arena"),
            socket=str(socket),
            transport="shm",
            keep_arena=False,
            log_level="warning",
            debug_checks=True,
        )
        running = await self._stack.enter_async_context(service(KvPool, settings, await self.connect()))
        self.pools[node] = running
        return running


@asynccontextmanager
async def cluster(connect: Connect, path: Path) -> AsyncIterator[Cluster]:
    """An empty cluster with a router's part."""
    async with asyncio.TaskGroup() as tasks, AsyncExitStack() as stack:
        made = Cluster(connect, stack, path)
        made.router = FakeRouter(await connect())
        beating = tasks.create_task(_hold(made.router))
        try:
            yield made
        finally:
            await stack.aclose()
            beating.cancel()


async def _hold(router: FakeRouter) -> None:
    async with asyncio.TaskGroup() as tasks:
        await router.start(tasks)


class Gate:
    """Holds the `number`-th sleep of a timed engine until `open`; all others take no time.

    On a node that prefills one request, 1 is its iteration and 2 the transfer; on the one that decodes it 1 is the
    transfer and 2 the first iteration.
    """

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.closed = asyncio.Event()
        self._open = asyncio.Event()
        self._count = 0

    def open(self) -> None:
        self._open.set()

    async def sleep(self, _: float) -> None:
        self._count += 1
        if self._count == self.number:
            self.closed.set()
            await self._open.wait()
        await asyncio.sleep(0)


def timed(
    sleep: Sleep = asyncio.sleep, store: BlockStore | None = None, times: PrefillTime | None = None
) -> Callable[[App[EngineSettings]], EngineService]:
    """A builder of timed engines whose sleeps, blocks or predictions are the test's own."""

    def make(app: App[EngineSettings]) -> EngineService:
        path, settings = app.settings.pool_path, app.settings.timed
        pool = NodePool(path, app.log) if path is not None else None
        blocks = store or (ArenaBlocks(pool, settings.block_bytes) if pool is not None else NoBlocks())
        backend = TimedBackend(settings, blocks, app.clock, sleep=sleep)
        return EngineService(app, backend, pool, times=times or PRESETS[settings.preset].times)

    return make


def prompt_of(seed: int, tokens: int) -> list[int]:
    """A prompt that shares nothing with those of other seeds."""
    source = random.Random(seed)
    return [source.randrange(1000, 100_000) for _ in range(tokens)]
