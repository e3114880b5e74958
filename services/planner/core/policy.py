"""The planner's policy, hand-ordered part: what an order becomes, which nodes it moves, and what it cost.

The split is read from heartbeats at every order; the planner's own memory of former orders decides nothing but epochs.
"""

from dataclasses import dataclass, field

from schemas.iteration_model import IterationModel
from schemas.phase import Decision, Phase, PhaseCommand, PhaseState, Split, Workload
from schemas.telemetry import IterationBatch, NodeTelemetry, RequestTelemetry
from services.planner.core.fleet import Fleet, Pending
from services.planner.core.moves import Move, Refused, move_of_phase, moves_for_split
from services.planner.core.options import MODES, OFF, PlannerSettings
from services.planner.core.switches import Part, Switch, SwitchBook
from services.planner.core.windows import Slice, Windows


@dataclass(frozen=True, slots=True)
class Command:
    """Tell `node` to serve `phase`, as `epoch`."""

    node: str
    phase: Phase
    epoch: int


@dataclass(frozen=True, slots=True)
class Order:
    """What an accepted order becomes; without commands the split is the wanted one already."""

    decision_id: str
    split_now: str
    split_new: str
    commands: list[Command]
    workload: Workload | None
    q: float | None


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision taken without being asked: to be published (with the time), its `order` to be carried out before."""

    decision: Decision
    order: Order | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """Switches that have ended, nodes that fell silent, windows that closed, decisions taken and, when they changed,
    the models of all nodes (None: as before)."""

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
        self.run_id = run_id
        self.settings = settings
        self.fleet = Fleet(settings.node_timeout_s)
        self.switches = SwitchBook(settings.settle_s, settings.switch_timeout_s)
        self.windows = Windows(settings.window, now)
        self.pinned: set[str] = set()
        self.mode = OFF
        self._block_size = settings.block_size
        self._routers: dict[str, float] = {}
        self._finished: list[list[Slice]] = []

    def heard(self, beat: NodeTelemetry, now: float) -> None:
        """A node's heartbeat."""
        self._advance(now)
        self.fleet.heard(beat, now)
        self.switches.restarted(beat.node, beat.engine_incarnation, now)
        self.windows.node_beat(beat.node, beat.running_decode, now)

    def router_heard(self, router: str, now: float) -> None:
        """A router's heartbeat."""
        self._advance(now)
        self._routers[router] = now
        self.windows.router_beat(router, now)

    def request_ended(self, request: RequestTelemetry, now: float) -> None:
        """A finished request: work for the windows, and a loss if it was lost in a switch."""
        self._advance(now)
        self.windows.request(request)
        self.switches.request_ended(request, self._block_size)

    def iterations(self, batch: IterationBatch, now: float) -> None:
        """Iterations of one node."""
        self._advance(now)
        self.windows.iterations(batch)

    def block_size(self, tokens: int) -> None:
        """The cluster's block size, from a node's hello."""
        self._block_size = tokens

    def phase_state(self, state: PhaseState, now: float) -> None:
        """A node's answer to a command."""
        self.switches.answered(state, now)
        self._mark_windows()

    def command_seen(self, command: PhaseCommand, now: float) -> None:
        """A command in the phase stream: our own come back, another planner's overtake ours, old ones set the epoch."""
        pending = Pending(command.phase, command.epoch, command.decision_id)
        if self.fleet.commanded(command.node, pending):
            text = f"overtaken by decision {command.decision_id} of another planner"
            self.switches.supersede(command.node, command.epoch + 1, text, now)
            self._mark_windows()

    def decision_seen(self, decision: Decision) -> None:
        """The last stored decision, read at start: pins and mode outlive the process."""
        self.pinned = set(decision.pinned)
        self.mode = decision.mode if decision.mode in MODES else OFF

    def order_split(self, target: Split, decision_id: str, now: float) -> Order:
        """Order a split by hand; raises `Refused`."""
        return self._order(moves_for_split(self.fleet.live(), target, self.pinned), decision_id, now)

    def order_phase(self, node: str, phase: Phase, decision_id: str, now: float) -> Order:
        """Order one node's phase by hand; raises `Refused`."""
        return self._order(move_of_phase(self.fleet.live(), node, phase, self.pinned), decision_id, now)

    def withdraw(self, order: Order, problem: str, now: float) -> None:
        """The commands did not reach the stream: the order's open parts end with `problem`."""
        for command in order.commands:
            self.fleet.forget_command(command.node, order.decision_id)
            self.switches.fail(command.node, problem, now)
        self._mark_windows()

    def pin(self, node: str, *, pinned: bool) -> None:
        """Pin a live node to its phase, or unpin any node; raises `Refused`."""
        if pinned and self.fleet.get(node) is None:
            known = ", ".join(live.name for live in self.fleet.live()) or "none"
            raise Refused(f"node {node!r} is not live; live nodes: {known}")
        (self.pinned.add if pinned else self.pinned.discard)(node)

    def set_mode(self, mode: str) -> None:
        """Choose the mode; raises `Refused` for an unknown one, and for automatic ones, which this version lacks."""
        if mode not in MODES:
            raise Refused(f"mode {mode!r} is none of {', '.join(MODES)}")
        if mode != OFF:
            raise Refused(
                f"mode {mode!r} needs the throughput model, which this version does not have: "
                "the split changes by hand only (ei split, ei phase)"
            )
        self.mode = mode

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
        self._mark_windows()
        windows, self._finished = self._finished, []
        return Report(done, silent, windows)

    def _order(self, moves: list[Move], decision_id: str, now: float) -> Order:
        self._advance(now)
        split_now = str(self.fleet.split())
        commands = [Command(move.node, move.new, self.fleet.next_epoch(move.node)) for move in moves]
        parts = {
            move.node: Part(move.node, move.old, move.new, command.epoch, self._incarnation(move.node))
            for move, command in zip(moves, commands, strict=True)
        }
        if parts:
            self.switches.begin(Switch(decision_id, now, parts))
        for command in commands:
            self.fleet.commanded(command.node, Pending(command.phase, command.epoch, decision_id))
        self._mark_windows()
        workload, q = self.windows.recent(now)
        return Order(decision_id, split_now, str(self.fleet.split()), commands, workload, q)

    def _advance(self, now: float) -> None:
        self._finished += self.windows.advance(now)

    def _incarnation(self, name: str) -> int:
        node = self.fleet.get(name)
        assert node is not None, f"a move of {name!r}, which is not live"
        return node.incarnation

    def _mark_windows(self) -> None:
        self.windows.switching(active=any(s.ended_at is None for s in self.switches.open.values()))

    def check(self) -> None:
        """The invariants of all parts; the windows know whether a switch is under way."""
        self.fleet.check()
        self.switches.check()
        self.windows.check()
        assert self.mode in MODES
