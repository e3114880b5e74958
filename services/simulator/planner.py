"""The planner in virtual time: the product's core, fed with the telemetry that nodes and router would send."""

from collections.abc import Sequence

from schemas.iteration_model import IterationModel
from schemas.kv import Capacities, NodeHello
from schemas.phase import Decision, Phase, PhaseState, SwitchState
from schemas.telemetry import Iteration, IterationBatch, KvUse, NodeTelemetry, RequestTelemetry, TierUse
from services.engine.core.timing import PrefillTerms
from services.planner.core.ordering import Command
from services.planner.core.policy import Planner, PlannerSettings
from services.simulator.call import Call
from services.simulator.system import Cluster, Move

BEAT_S = 1.0
ROUTER = "router"
_START = ("warm-up", "initial")


class SimulatedPlanner:
    """Heartbeats once a second, and between them what ended. `decisions` has everything it decided.

    k and E come from the coefficients' expert share (as k of 1/share experts).
    """

    def __init__(self, settings: PlannerSettings, cluster: Cluster, now: float) -> None:
        self.core = Planner(settings, now)
        self.decisions: list[tuple[float, Decision]] = []
        self.models: dict[str, IterationModel] = {}
        self._cluster = cluster
        self._commands: dict[str, Command] = {}
        self._phases: dict[str, tuple[Phase, int]] = {}
        self._seq = 0
        share = cluster.times.active_share
        for name, node in cluster.nodes.items():
            self._phases[name] = node.phase or Phase.BOTH, 0
            hello = NodeHello(
                node=name,
                incarnation=1,
                engine_incarnation=1,
                model=cluster.hardware.name,
                block_size=cluster.block_tokens,
                key_version="simulated",
                ranks=1,
                engine="simulated",
                dtype="",
                capacities=Capacities(
                    l1_tokens=node.l1_tokens, l2_tokens=node.l2_tokens, running=cluster.hardware.max_running
                ),
                transfer="",
                experts_per_token=1000 if share < 1 else 0,
                experts=round(1000 / share) if share < 1 else 0,
                batch_tokens=cluster.batch_tokens,
            )
            self.core.hello(hello)

    def beat(self, now: float) -> list[Move]:
        """One heartbeat of everybody; the moves that the planner orders."""
        self.core.router_heard(ROUTER, now)
        for name, node in self._cluster.nodes.items():
            phase, epoch = self._phases[name]
            waiting = sum(call.prefill_started_at is None for call in node.prefill_calls.values())
            running = len(node.prefill_calls) - waiting
            beat = NodeTelemetry(
                node=name,
                t=now,
                incarnation=1,
                phase=phase,
                epoch=epoch,
                waiting=waiting,
                running=running + node.decoding,
                running_prefill=running,
                running_decode=node.decoding,
                kv=KvUse(
                    l1=TierUse(used=0, total=node.l1_tokens),
                    l2=TierUse(used=node.l2_used_tokens, total=node.l2_tokens, referenced=node.l2_referenced_tokens),
                ),
                last_kv_seq=0,
                engine_incarnation=1,
            )
            self.core.heard(beat, now)
        report = self.core.tick(now)
        if report.models is not None:
            self.models = {model.node: model for model in report.models}
        moves: list[Move] = []
        for decided in report.decided:
            self.decisions.append((now, decided.decision))
            if decided.order is not None:
                counts = decided.decision.kind not in _START
                moves += self._ordered(decided.order.commands, decided.decision.why, counts=counts)
        return moves

    def _ordered(self, commands: Sequence[Command], why: str, *, counts: bool) -> list[Move]:
        for command in commands:
            self._commands[command.node] = command
            self._phases[command.node] = command.phase, command.epoch
        return [Move(command.node, command.phase, why, counts) for command in commands]

    def moved(self, node: str, now: float) -> None:
        """A node has carried its command out."""
        command = self._commands.pop(node, None)
        if command is not None:
            state = PhaseState(
                id=f"{node}/{command.epoch}",
                t=now,
                node=node,
                phase=command.phase,
                epoch=command.epoch,
                state=SwitchState.SWITCHED,
            )
            self.core.phase_state(state, now)

    def prefill_iterated(self, node: str, terms: PrefillTerms, cached: int, duration_s: float, now: float) -> None:
        self._seq += 1
        iteration = Iteration(
            t=now,
            seq=self._seq,
            phase=Phase.PREFILL,
            duration_s=duration_s,
            requests=terms.requests,
            uncached_tokens=terms.uncached_tokens,
            attention_pairs=terms.attention_pairs,
            restored_tokens=terms.restored_tokens,
            cached_tokens=cached,
        )
        self.core.iterations(IterationBatch(node=node, incarnation=1, iterations=[iteration]), now)

    def decode_iterated(
        self, node: str, count: int, requests: int, context_tokens: float, duration_s: float, now: float
    ) -> None:
        """While a node's model is learned each iteration is told by itself, afterwards a row of equal ones as one."""
        known = self.models.get(node)
        learning = known is None or not known.frozen or Phase.DECODE in known.borrowed
        times = count if learning else 1
        hardware = self._cluster.hardware
        batch = requests if learning else requests * count
        self._seq += 1
        iteration = Iteration(
            t=now,
            seq=self._seq,
            phase=Phase.DECODE,
            duration_s=duration_s / times,
            requests=batch,
            context_tokens=int(context_tokens),
            accepted_tokens=round(batch * hardware.accepted_tokens),
            output_tokens=round(batch * hardware.accepted_tokens),
            fed_tokens=round(batch * hardware.times.fed_tokens),
        )
        self.core.iterations(IterationBatch(node=node, incarnation=1, iterations=[iteration] * times), now)

    def answered(self, call: Call, lineage: str, ideal_tokens: int, now: float) -> None:
        """A finished request."""
        record = RequestTelemetry(
            id=call.id,
            t=now,
            request=call.id,
            branch=call.branch,
            version=call.version,
            outcome="stop",
            t_arrive=call.arrived_at,
            t_placed=call.placed_at,
            t_prefill_start=call.prefill_started_at,
            t_first_token=call.first_token_at,
            t_end=now,
            prompt_tokens=call.prompt_tokens,
            cached_tokens=call.cached_tokens,
            restored_tokens=call.restored_tokens,
            uncached_tokens=call.uncached_tokens,
            ideal_tokens=ideal_tokens,
            output_tokens=call.output_tokens,
            prefill_node=call.prefill_node,
            decode_node=call.decode_node,
            lineage=lineage,
        )
        self.core.request_ended(record, now)
