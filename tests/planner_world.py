"""A small cluster in stepped time for the planner: agents that prefill, decode and pause on nodes that obey at once.

Times come from an `IterationModel`; prefill is first come, first served, one request an iteration, decode is shared.
"""

import random
from collections import deque
from dataclasses import dataclass, field

from schemas.iteration_model import IterationModel
from schemas.kv import Capacities, NodeHello
from schemas.phase import Phase, PhaseCommand, PhaseState, SwitchState
from schemas.telemetry import Iteration, IterationBatch, KvUse, NodeTelemetry, RequestTelemetry, TierUse
from services.planner.core.policy import Order, Planner, Report

STEP_S = 0.25
T_ACC = 2.5
GLM = IterationModel(
    node="",
    c0=0.1,
    c1=3.4e-5,
    c2=2.35e-10,
    c3=2e-7,
    d0=0.006,
    d1=0.013,
    d2=0.0004,
    d3=0.001,
    experts_per_token=8,
    experts=256,
    fed_tokens=4.0,
)


@dataclass(slots=True)
class Job:
    """One request: its size, when it came, and what of it is left."""

    agent: int
    t_uc: int
    t_c: int
    t_out: int
    arrived: float
    left: float = 0.0

    @property
    def pairs(self) -> float:
        return self.t_uc * self.t_c + self.t_uc * (self.t_uc + 1) / 2


@dataclass(slots=True)
class FakeNode:
    """Its phase, prefill queue and running decodes."""

    name: str
    phase: Phase
    epoch: int = 0
    queue: deque[Job] = field(default_factory=deque)
    decoding: list[Job] = field(default_factory=list)
    iterations: list[Iteration] = field(default_factory=list)


@dataclass(slots=True)
class World:
    """`agents` closed-loop agents on nodes named n0.. with `phases`; `work` gives (t_uc, t_c, t_out) means."""

    phases: list[Phase]
    agents: int
    think_s: float
    work: tuple[float, float, float]
    times: IterationModel = GLM
    seed: int = 1
    now: float = 0.0
    answered: int = 0
    orders: list[Order] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    nodes: list[FakeNode] = field(default_factory=list)
    _wake: list[float] = field(default_factory=list)
    _draw: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self._draw.seed(self.seed)
        self.nodes = [FakeNode(f"n{at}", phase) for at, phase in enumerate(self.phases)]
        self._wake = [self._draw.uniform(0, self.think_s + 5) for _ in range(self.agents)]

    @property
    def split(self) -> str:
        counts = [sum(node.phase is phase for node in self.nodes) for phase in Phase]
        return f"{counts[0]}P{counts[1]}D" + (f"+{counts[2]}both" if counts[2] else "")

    def hello(self, planner: Planner) -> None:
        for node in self.nodes:
            capacities = Capacities(l1_tokens=2_900_000, l2_tokens=20_000_000, running=256)
            planner.hello(
                NodeHello(
                    node=node.name,
                    incarnation=1,
                    engine_incarnation=1,
                    model="m",
                    block_size=64,
                    key_version="1",
                    ranks=4,
                    engine="timed",
                    dtype="fp8",
                    capacities=capacities,
                    transfer="",
                    experts_per_token=self.times.experts_per_token,
                    experts=self.times.experts,
                    batch_tokens=8192,
                )
            )

    def run(self, planner: Planner, seconds: float) -> None:
        """Let time pass; every second nodes report, and the planner's orders are obeyed at once."""
        until = self.now + seconds
        while self.now < until - 1e-9:
            self.now += STEP_S
            self._step(planner)
            if abs(self.now - round(self.now)) < STEP_S / 2:
                self._report(planner)

    def obey(self, planner: Planner, order: Order) -> None:
        """Carry an order out: waiting requests move to other nodes, running ones end where they are."""
        self.orders.append(order)
        for command in order.commands:
            node = next(node for node in self.nodes if node.name == command.node)
            node.phase, node.epoch = command.phase, command.epoch
            waiting = []
            if not node.phase.serves(Phase.PREFILL):
                while len(node.queue) > 1:
                    waiting.append(node.queue.pop())
            for job in reversed(waiting):
                self._place(job)
            told = PhaseCommand(
                id="c", t=0.0, node=node.name, phase=node.phase, epoch=node.epoch, reason="", decision_id="x"
            )
            planner.command_seen(told, self.now)
            done = PhaseState(
                id="s", t=0.0, node=node.name, phase=node.phase, epoch=node.epoch, state=SwitchState.SWITCHED
            )
            planner.phase_state(done, self.now)

    def _step(self, planner: Planner) -> None:
        for agent, wake in enumerate(self._wake):
            if wake <= self.now:
                self._wake[agent] = float("inf")
                t_uc, t_c, t_out = (max(16, round(mean * self._draw.gammavariate(2, 0.5))) for mean in self.work)
                self._place(Job(agent, t_uc, t_c, t_out, self.now))
        for node in self.nodes:
            self._prefill(node)
            self._decode(node, planner)

    def _place(self, job: Job) -> None:
        open_nodes = [node for node in self.nodes if node.phase.serves(Phase.PREFILL)]
        job.left = self._prefill_s(job)
        min(open_nodes, key=lambda node: sum(other.left for other in node.queue)).queue.append(job)

    def _prefill_s(self, job: Job) -> float:
        times = self.times
        return times.c0 + times.c1 * job.t_uc + times.c2 * job.pairs + times.c3 * job.t_c

    def _prefill(self, node: FakeNode) -> None:
        budget = STEP_S
        while node.queue and budget > 0:
            job = node.queue[0]
            spent = min(budget, job.left)
            job.left -= spent
            budget -= spent
            if job.left > 1e-9:
                break
            node.queue.popleft()
            node.iterations.append(
                Iteration(
                    t=0.0,
                    seq=0,
                    phase=Phase.PREFILL,
                    duration_s=self._prefill_s(job) * self._draw.uniform(0.98, 1.02),
                    requests=1,
                    uncached_tokens=job.t_uc,
                    attention_pairs=job.pairs,
                    restored_tokens=job.t_c,
                    cached_tokens=job.t_c,
                )
            )
            job.left = job.t_out / T_ACC
            open_nodes = [other for other in self.nodes if other.phase.serves(Phase.DECODE)]
            min(open_nodes, key=lambda other: len(other.decoding)).decoding.append(job)

    def _decode(self, node: FakeNode, planner: Planner) -> None:
        running = len(node.decoding)
        if not running:
            return
        context = sum(job.t_c + job.t_uc for job in node.decoding)
        times, phi = self.times, 1 - (1 - self.times.expert_share) ** (self.times.fed_tokens * running)
        seconds = times.d0 + times.d1 * phi + times.d2 * running + times.d3 * context / 1e6
        for _ in range(2):
            node.iterations.append(
                Iteration(
                    t=0.0,
                    seq=0,
                    phase=Phase.DECODE,
                    duration_s=seconds * self._draw.uniform(0.98, 1.02),
                    requests=running,
                    context_tokens=context,
                    fed_tokens=round(times.fed_tokens * running),
                    accepted_tokens=round(T_ACC * running),
                )
            )
        for job in node.decoding:
            job.left -= STEP_S / seconds
        for job in [job for job in node.decoding if job.left <= 0]:
            node.decoding.remove(job)
            self.answered += 1
            self._wake[job.agent] = self.now + self._draw.expovariate(1 / self.think_s)
            planner.request_ended(self._record(job, node), self.now)

    def _record(self, job: Job, node: FakeNode) -> RequestTelemetry:
        return RequestTelemetry(
            id="t",
            t=self.now,
            request=f"{job.agent}-{job.arrived}",
            branch=str(job.agent),
            version=0,
            outcome="length",
            t_arrive=job.arrived,
            t_end=self.now,
            prompt_tokens=job.t_uc + job.t_c,
            cached_tokens=job.t_c,
            restored_tokens=job.t_c,
            uncached_tokens=job.t_uc,
            output_tokens=job.t_out,
            prefill_node=node.name,
            decode_node=node.name,
        )

    def _report(self, planner: Planner) -> None:
        planner.router_heard("r0", self.now)
        for node in self.nodes:
            batch = IterationBatch(node=node.name, incarnation=1, iterations=node.iterations)
            planner.iterations(batch, self.now)
            node.iterations = []
            planner.heard(self._beat(node), self.now)
        report = planner.tick(self.now)
        planner.check()
        self.reports.append(report)
        for decided in report.decided:
            if decided.order is not None:
                self.obey(planner, decided.order)

    def _beat(self, node: FakeNode) -> NodeTelemetry:
        use = TierUse(used=0, total=100)
        return NodeTelemetry(
            node=node.name,
            t=0.0,
            incarnation=1,
            phase=node.phase,
            epoch=node.epoch,
            waiting=max(0, len(node.queue) - 1),
            running=len(node.decoding),
            kv=KvUse(l1=use, l2=use),
            last_kv_seq=0,
            engine_incarnation=1,
            running_prefill=min(1, len(node.queue)),
            running_decode=len(node.decoding),
        )
