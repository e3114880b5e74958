"""The planner in virtual time: the product's core, fed with the telemetry that nodes and router would send."""

from collections.abc import Sequence

from schemas.iteration_model import IterationModel
from schemas.phase import Decision, Phase, PhaseState, SwitchState
from schemas.telemetry import Iteration, IterationBatch, NodeTelemetry, RequestTelemetry
from services.engine.core.timing import PrefillTerms
from services.planner.core.ordering import Command
from services.planner.core.policy import Planner, PlannerSettings
from services.simulator.call import Call
from services.simulator.system import Cluster, Move
from services.simulator.telemetry import beat_of, hello_of

BEAT_S = 1.0
ROUTER = "router"
_START = ("warm-up", "initial")


class SimulatedPlanner:
    """Heartbeats once a second, and between them what ended. `decisions` has everything it decided, `models` the newest
    models it published."""

    def __init__(self, settings: PlannerSettings, cluster: Cluster, now: float) -> None:
        self.core = Planner(settings, now)
        self.decisions: list[tuple[float, Decision]] = []
        self.models: dict[str, IterationModel] = {}
        self._cluster = cluster
        self._commands: dict[str, Command] = {}
        self._phases: dict[str, tuple[Phase, int]] = {}
        self._seq = 0
        for name, node in cluster.nodes.items():
            self._phases[name] = node.phase or Phase.BOTH, 0
            self.core.hello(hello_of(name, node, cluster))

    def beats(self, now: float) -> list[NodeTelemetry]:
        """The heartbeats of all nodes."""
        return [beat_of(name, node, *self._phases[name], now) for name, node in self._cluster.nodes.items()]

    def beat(self, now: float) -> list[Move]:
        """One heartbeat of everybody; the moves that the planner orders."""
        return self.tick(self.beats(now), now)

    def tick(self, beats: Sequence[NodeTelemetry], now: float) -> list[Move]:
        """The same, of heartbeats that others have heard too."""
        self.core.router_heard(ROUTER, now)
        for beat in beats:
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

    def epoch(self, node: str) -> int:
        """Of the node's last command."""
        return self._phases[node][1]

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
            media=terms.media,
        )
        self.core.iterations(IterationBatch(node=node, incarnation=1, iterations=[iteration]), now)

    def decode_iterated(
        self, node: str, count: int, requests: int, context_tokens: float, duration_s: float, now: float
    ) -> None:
        """In warm-up each iteration is told by itself, afterwards one of a row of equal ones."""
        known = self.models.get(node)
        learning = known is None or not known.frozen or Phase.DECODE in known.borrowed
        hardware = self._cluster.hardware
        self._seq += 1
        iteration = Iteration(
            t=now,
            seq=self._seq,
            phase=Phase.DECODE,
            duration_s=duration_s / count,
            requests=requests,
            context_tokens=int(context_tokens),
            accepted_tokens=round(requests * hardware.accepted_tokens),
            output_tokens=round(requests * hardware.accepted_tokens),
            fed_tokens=round(requests * hardware.times.fed_tokens),
        )
        told = [iteration] * (count if learning else 1)
        self.core.iterations(IterationBatch(node=node, incarnation=1, iterations=told), now)

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
            media=call.media,
        )
        self.core.request_ended(record, now)
