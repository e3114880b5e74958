"""What the node says about itself: hello, heartbeat, phase, iterations."""

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from schemas.codec import encode
from schemas.kv import Capacities, NodeHello
from schemas.phase import PhaseState
from schemas.pool import PoolStatus
from schemas.subjects import Subjects
from schemas.telemetry import Iteration, IterationBatch, KvUse, NodeTelemetry, TierUse
from services.bus import Bus, BusError
from services.clock import Clock
from services.engine.backend import Backend
from services.engine.core.effects import PhaseReport
from services.engine.core.queueing import Queueing
from services.engine.node_pool import NodePool
from services.observe import RateLimitedLog

HEARTBEAT_S = 1.0
ITERATIONS_S = 0.1
_ITERATIONS_AT_ONCE = 2000


@dataclass(frozen=True, slots=True)
class Identity:
    """Who speaks: `incarnation` changes with every start of the engine service."""

    node: str
    incarnation: int


class NodeReports:
    """Publishes; everything is sent from tasks of its own, in order."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        identity: Identity,
        backend: Backend,
        pool: NodePool | None,
        core: Queueing,
        clock: Clock,
        log: RateLimitedLog,
        ready: Callable[[], bool],
        by_length: Callable[[], list[int]],
    ) -> None:
        self._bus, self._subjects, self._identity = bus, subjects, identity
        self._backend, self._pool, self._core = backend, pool, core
        self._clock, self._log, self._ready, self._by_length = clock, log, ready, by_length
        self._iterations: list[Iteration] = []
        self._phases: list[PhaseReport] = []
        self._beat = asyncio.Event()
        self._said_hello: int | None = None

    def start(self, tasks: asyncio.TaskGroup) -> None:
        tasks.create_task(self._run_heartbeat(), name="heartbeat")
        tasks.create_task(self._run_iterations(), name="iteration telemetry")

    def iteration(self, iteration: Iteration) -> None:
        """Goes out with the others of the next 100 ms."""
        self._iterations.append(iteration)

    def phase(self, report: PhaseReport) -> None:
        """Goes out at once, with a heartbeat."""
        self._phases.append(report)
        self._beat.set()

    async def asked(self) -> None:
        """Somebody who has just started wants to know who is here: say it all, so that he need not wait for a beat."""
        await self.hello()
        self._beat.set()

    async def hello(self) -> None:
        """Say what this node is; nothing before its pool has said which life of it this is."""
        pool, info = self._pool, self._backend.info
        if pool is not None and not pool.incarnation:
            return
        message = NodeHello(
            node=self._identity.node,
            incarnation=pool.incarnation if pool is not None else self._identity.incarnation,
            engine_incarnation=self._identity.incarnation,
            model=info.model,
            block_size=info.block_size,
            key_version=info.key_version,
            ranks=info.ranks,
            engine=info.engine,
            dtype=info.dtype,
            capacities=Capacities(
                l1_tokens=info.l1_tokens,
                l2_tokens=pool.slots * info.block_size if pool is not None else 0,
                running=info.max_running,
            ),
            transfer="",
            rendezvous=info.rendezvous,
            max_context_tokens=info.max_context_tokens,
            tokenizer=info.tokenizer,
            experts_per_token=info.experts_per_token,
            experts=info.experts,
            batch_tokens=info.batch_tokens,
        )
        self._said_hello = message.incarnation
        await self._publish(self._subjects.node_hello(self._identity.node), encode(message))

    async def _run_heartbeat(self) -> None:
        while True:
            phases, self._phases = self._phases, []
            for report in phases:
                await self._publish(self._subjects.phase_state(self._identity.node), encode(self._phase_state(report)))
            await self.heartbeat()
            if self._pool is not None and self._pool.incarnation != self._said_hello:
                await self.hello()
            self._beat.clear()
            if self._phases:
                continue
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._beat.wait()
            except TimeoutError:
                continue

    async def heartbeat(self) -> None:
        """Say that this node lives, and how it is."""
        status = await self._pool.status() if self._pool is not None else None
        info, counts, switch = self._backend.info, self._core.counts(), self._core.switch
        own = self._identity.incarnation
        message = NodeTelemetry(
            node=self._identity.node,
            t=self._clock.wall(),
            incarnation=own if self._pool is None else self._pool.incarnation,
            phase=switch.phase,
            epoch=switch.epoch,
            waiting=counts.waiting,
            running=counts.running_prefill + counts.running_decode,
            kv=KvUse(
                l1=TierUse(used=self._backend.used_tokens(), total=info.l1_tokens),
                l2=_host_use(status, info.block_size),
            ),
            last_kv_seq=status.last_kv_seq if status is not None else 0,
            engine_incarnation=own,
            running_prefill=counts.running_prefill,
            running_decode=counts.running_decode,
            decoding_by_length=self._by_length(),
            ready=self._ready(),
        )
        await self._publish(self._subjects.telemetry_node(self._identity.node), encode(message))

    def _phase_state(self, report: PhaseReport) -> PhaseState:
        return PhaseState(
            id=uuid.uuid4().hex,
            t=self._clock.wall(),
            node=self._identity.node,
            phase=report.phase,
            epoch=report.epoch,
            state=report.state,
            took_s=report.took_s,
            moved=report.moved,
            longest_running_s=report.longest_running_s,
            decision_id=report.decision_id,
        )

    async def _run_iterations(self) -> None:
        while True:
            await asyncio.sleep(ITERATIONS_S)
            part, self._iterations = self._iterations[:_ITERATIONS_AT_ONCE], self._iterations[_ITERATIONS_AT_ONCE:]
            if part:
                node = self._identity.node
                batch = IterationBatch(node=node, incarnation=self._identity.incarnation, iterations=part)
                await self._publish(self._subjects.telemetry_iteration(node), encode(batch))

    async def _publish(self, subject: str, data: bytes) -> None:
        """Telemetry that cannot be sent now is worth nothing later."""
        try:
            await self._bus.publish(subject, data)
        except BusError as error:
            self._log.warning("not_published", kind=subject, subject=subject, error=str(error))


def _host_use(status: PoolStatus | None, block_size: int) -> TierUse:
    if status is None:
        return TierUse(used=0, total=0)
    return TierUse(
        used=status.used_blocks * block_size,
        total=status.total_blocks * block_size,
        referenced=status.referenced_blocks * block_size,
    )
