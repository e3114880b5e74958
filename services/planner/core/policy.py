"""The planner's policy: what it hears, orders by hand, and the passing of time.

The split is read from heartbeats at every order; the planner's own memory of former orders decides nothing but epochs.
What it does without being asked is in `autopilot`.
"""

from dataclasses import dataclass, field

from schemas.iteration_model import IterationModel
from schemas.kv import NodeHello
from schemas.phase import Decision, Phase, PhaseCommand, PhaseState, Split
from schemas.telemetry import IterationBatch, NodeTelemetry, RequestTelemetry
from services.planner.core.autopilot import Autopilot, Decided
from services.planner.core.explain import Standing
from services.planner.core.fleet import Fleet, Pending
from services.planner.core.iteration_model import LearnedModels
from services.planner.core.moves import Move, Refused, move_of_phase, moves_for_split
from services.planner.core.options import MODES, PlannerSettings
from services.planner.core.ordering import Command, Order, Ordering
from services.planner.core.switches import Switch, SwitchBook
from services.planner.core.windows import Slice, Windows

__all__ = ["Command", "Decided", "Order", "Planner", "PlannerSettings", "Report"]
PUBLISH_S = 5.0
"""How often the models are published while nothing about them changes but nu and rho."""


@dataclass(frozen=True, slots=True)
class Report:
    """Switches that have ended, nodes that fell silent, windows that closed, decisions taken, and now and then the
    models of all nodes (None: nothing to publish yet)."""

    switches: list[Switch]
    silent: list[str]
    windows: list[list[Slice]]
    decided: list[Decided] = field(default_factory=list)
    models: list[IterationModel] | None = None


class Planner:
    """Heartbeats, phase states, commands of the stream and finished requests in; orders and reports out.

    Every method takes the monotonic time `now` in seconds and never goes back in it.
    """

    def __init__(self, settings: PlannerSettings, now: float, run_id: str = "planner") -> None:
        """`run_id` begins the ids of the decisions taken here; it must differ between planners and restarts."""
        self.settings = settings
        self.fleet = Fleet(settings.node_timeout_s)
        self.switches = SwitchBook(settings.settle_s, settings.switch_timeout_s)
        self.windows = Windows(settings.window, now, by_start=settings.decide.by_start)
        self.models = LearnedModels(settings.model)
        self._ordering = Ordering(self.fleet, self.switches, self.windows, settings.decide.drain_wait_s)
        self._autopilot = Autopilot(settings, self._ordering, self.models, run_id)
        self._block_size = settings.block_size
        self._routers: dict[str, float] = {}
        self._finished: list[list[Slice]] = []
        self._publish_at = now

    @property
    def mode(self) -> str:
        """on, off or dry-run."""
        return self._autopilot.mode

    @property
    def pinned(self) -> set[str]:
        """Nodes that no order for a split moves."""
        return self._autopilot.pinned

    def standing(self) -> Standing:
        """Pins, mode and frozen models: every decision carries them, and the planner that starts next takes them."""
        return self._autopilot.standing()

    def heard(self, beat: NodeTelemetry, now: float) -> None:
        """A node's heartbeat."""
        self._advance(now)
        self.fleet.heard(beat, now)
        self.switches.restarted(beat.node, beat.engine_incarnation, now)
        waiting = beat.waiting if beat.phase.serves(Phase.PREFILL) else 0  # on decode nodes: legs whose prefill goes on
        in_flight = waiting + beat.running_prefill + beat.running_decode
        lengths = tuple(beat.decoding_by_length)
        self.windows.node_beat(beat.node, beat.running_decode, in_flight, now, lengths, beat.engine_incarnation)

    def router_heard(self, router: str, now: float) -> None:
        """A router's heartbeat."""
        self._advance(now)
        self._routers[router] = now
        self.windows.router_beat(router, now)

    def request_ended(self, request: RequestTelemetry, now: float) -> None:
        """A finished request: work for the windows, and a loss if it was lost in a switch."""
        self._advance(now)
        self.windows.request(request)
        self.models.request(request)
        self.switches.request_ended(request, self._block_size)

    def iterations(self, batch: IterationBatch, now: float) -> None:
        """Iterations of one node."""
        self._advance(now)
        self.windows.iterations(batch)
        self.models.iterations(batch, now)

    def hello(self, hello: NodeHello) -> None:
        """What a node is."""
        self._block_size = hello.block_size
        self._autopilot.hello(hello)

    def phase_state(self, state: PhaseState, now: float) -> None:
        """A node's answer to a command."""
        self.switches.answered(state, now)
        self._ordering.mark_windows(now)

    def command_seen(self, command: PhaseCommand, now: float) -> None:
        """A command in the phase stream: our own come back, another planner's overtake ours, old ones set the epoch."""
        pending = Pending(command.phase, command.epoch, command.decision_id)
        if self.fleet.commanded(command.node, pending):
            text = f"overtaken by decision {command.decision_id} of another planner"
            self.switches.supersede(command.node, command.epoch + 1, text, now)
            self._ordering.mark_windows(now)

    def decision_seen(self, decision: Decision, now: float) -> None:
        """The last stored decision, read at start: pins, mode and models outlive the process."""
        self._autopilot.resume(decision, now)

    def order_split(self, target: Split, decision_id: str, now: float) -> Order:
        """Order a split by hand; raises `Refused`."""
        return self._by_hand(moves_for_split(self.fleet.live(), target, self.pinned), decision_id, now)

    def order_phase(self, node: str, phase: Phase, decision_id: str, now: float) -> Order:
        """Order one node's phase by hand; raises `Refused`."""
        return self._by_hand(move_of_phase(self.fleet.live(), node, phase, self.pinned), decision_id, now)

    def withdraw(self, order: Order, problem: str, now: float) -> None:
        """The commands did not reach the stream: the order's open parts end with `problem`."""
        self._ordering.withdraw(order, problem, now)

    def pin(self, node: str, *, pinned: bool) -> None:
        """Pin a live node to its phase, or unpin any node; raises `Refused`."""
        if pinned and self.fleet.get(node) is None:
            known = ", ".join(live.name for live in self.fleet.live()) or "none"
            raise Refused(f"node {node!r} is not live; live nodes: {known}")
        (self.pinned.add if pinned else self.pinned.discard)(node)

    def set_mode(self, mode: str) -> None:
        """Choose the mode; raises `Refused` for an unknown one."""
        if mode not in MODES:
            raise Refused(f"mode {mode!r} is none of {', '.join(MODES)}")
        self._autopilot.set_mode(mode)

    def tick(self, now: float) -> Report:
        """Time passes: what has ended since the last tick."""
        self._advance(now)
        silent = self.fleet.expire(now)
        for node in silent:
            self.windows.forget(node)
            self.switches.fail(node, f"silent for {self.settings.node_timeout_s:g} s", now)
        for router in [name for name, heard in self._routers.items() if now - heard > self.settings.node_timeout_s]:
            del self._routers[router]
            self.windows.forget(router)
        done = self.switches.due(now)
        for switch in done:
            for part in switch.parts.values():
                if part.problem:
                    self.fleet.forget_command(part.node, switch.decision_id)
            self._autopilot.switch_ended(min(now, switch.ordered_at + self.settings.decide.drain_wait_s))
        self._ordering.mark_windows(now)
        names = [node.name for node in self.fleet.live()]
        learned = self.models.advance(now, names)
        windows, self._finished = self._finished, []
        decided = self._autopilot.act(windows, self.windows.latest(self.settings.decide.early_slices), now)
        self.windows.warming(active=self._autopilot.warming_up)
        models = None
        if learned or now >= self._publish_at:
            self._publish_at = now + PUBLISH_S
            models = self.models.models(names) or None
        return Report(done, silent, windows, decided, models)

    def _by_hand(self, moves: list[Move], decision_id: str, now: float) -> Order:
        self._advance(now)
        self._autopilot.ordered_by_hand()
        return self._ordering.order(moves, decision_id, now)

    def _advance(self, now: float) -> None:
        self._finished += self.windows.advance(now)

    def check(self) -> None:
        """The invariants of all parts; the windows know whether a switch is under way."""
        self.fleet.check()
        self.switches.check()
        self.windows.check()
        self._autopilot.check()
