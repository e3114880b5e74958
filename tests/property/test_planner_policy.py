"""The planner's policy under any sequence of heartbeats, orders, answers, losses and foreign commands."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from schemas.phase import Phase, PhaseCommand, PhaseState, Split, SwitchState
from schemas.telemetry import KvUse, NodeTelemetry, RequestTelemetry, TierUse
from services.planner.core.moves import Refused
from services.planner.core.policy import Order, Planner, PlannerSettings

NAMES = ("a", "b", "c", "d")
PHASES = st.sampled_from(list(Phase))


def beat(name: str, phase: Phase, epoch: int, running: int = 0, incarnation: int = 1) -> NodeTelemetry:
    use = TierUse(used=0, total=100)
    return NodeTelemetry(
        node=name,
        t=0.0,
        incarnation=1,
        phase=phase,
        epoch=epoch,
        waiting=0,
        running=running,
        kv=KvUse(l1=use, l2=use),
        last_kv_seq=0,
        engine_incarnation=incarnation,
        running_prefill=running,
        running_decode=running,
    )


class PolicyMachine(RuleBasedStateMachine):
    """Simulated nodes obey commands when they read them, and answer when told to; some die and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.planner = Planner(PlannerSettings(), self.now)
        self.nodes: dict[str, tuple[Phase, int]] = {}
        self.sent: list[tuple[str, Phase, int, str]] = []
        self.orders = 0
        self.open: set[str] = set()

    def take(self, order: Order) -> None:
        if order.commands:
            self.open.add(order.decision_id)
        self.sent += [(c.node, c.phase, c.epoch, order.decision_id) for c in order.commands]

    @rule(name=st.sampled_from(NAMES), phase=PHASES, running=st.integers(0, 3))
    def node_reports(self, name: str, phase: Phase, running: int) -> None:
        current, epoch = self.nodes.setdefault(name, (phase, 0))
        self.planner.heard(beat(name, current, epoch, running), self.now)

    @rule(wanted=st.builds(Split, st.integers(0, 4), st.integers(0, 4)))
    def order_split(self, wanted: Split) -> None:
        self.orders += 1
        before = {node.name: node.phase for node in self.planner.fleet.live()}
        try:
            order = self.planner.order_split(wanted, f"d{self.orders}", self.now)
        except Refused:
            assert {node.name: node.phase for node in self.planner.fleet.live()} == before
            return
        self.take(order)
        split = self.planner.fleet.split()
        assert (split.prefill, split.decode, split.both) == (wanted.prefill, wanted.decode, 0)
        assert not {command.node for command in order.commands} & self.planner.pinned

    @rule(name=st.sampled_from(NAMES), phase=PHASES)
    def order_phase(self, name: str, phase: Phase) -> None:
        self.orders += 1
        before = self.planner.fleet.split()
        try:
            self.take(self.planner.order_phase(name, phase, f"d{self.orders}", self.now))
        except Refused:
            return
        after = self.planner.fleet.split()
        for kind in (Phase.PREFILL, Phase.DECODE):
            assert after.serving(kind) > 0 or before.serving(kind) == 0

    @rule(name=st.sampled_from(NAMES), pinned=st.booleans())
    def pin(self, name: str, pinned: bool) -> None:
        try:
            self.planner.pin(name, pinned=pinned)
        except Refused:
            assert pinned

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), finish=st.booleans())
    def node_reads_a_command(self, data: st.DataObject, finish: bool) -> None:
        name, phase, epoch, decision = self.sent.pop(data.draw(st.integers(0, len(self.sent) - 1)))
        command = PhaseCommand(id="c", t=0.0, node=name, phase=phase, epoch=epoch, reason="", decision_id=decision)
        self.planner.command_seen(command, self.now)
        if name in self.nodes and epoch > self.nodes[name][1]:
            self.nodes[name] = (phase, epoch)
        state = SwitchState.SWITCHED if finish else SwitchState.DRAINING
        answer = PhaseState(id="s", t=0.0, node=name, phase=phase, epoch=epoch, state=state, took_s=0.5)
        self.planner.phase_state(answer, self.now)

    @rule(name=st.sampled_from(NAMES), phase=PHASES, ahead=st.integers(-1, 2))
    def another_planner_commands(self, name: str, phase: Phase, ahead: int) -> None:
        epoch = max(0, self.planner.fleet.next_epoch(name) - 1 + ahead)
        command = PhaseCommand(id="f", t=0.0, node=name, phase=phase, epoch=epoch, reason="", decision_id="foreign")
        self.planner.command_seen(command, self.now)

    @rule(ideal=st.integers(0, 500), cached=st.integers(0, 500), outcome=st.sampled_from(["ok", "error", "cancelled"]))
    def request_ends(self, ideal: int, cached: int, outcome: str) -> None:
        record = RequestTelemetry(
            id="t",
            t=0.0,
            request="r",
            branch=None,
            version=None,
            outcome=outcome,
            t_arrive=0.0,
            t_end=1.0,
            prompt_tokens=400,
            cached_tokens=cached,
            ideal_tokens=ideal,
            output_tokens=1,
        )
        self.planner.request_ended(record, self.now)

    @rule(name=st.sampled_from(NAMES))
    def node_restarts(self, name: str) -> None:
        if name in self.nodes:
            self.planner.heard(beat(name, *self.nodes[name], incarnation=int(self.now) + 2), self.now)

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0, 90.0, 700.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        report = self.planner.tick(self.now)
        for switch in report.switches:
            assert switch.ended_at is not None
            self.open.remove(switch.decision_id)
        assert not set(report.silent) & {node.name for node in self.planner.fleet.live()}
        if seconds >= 700:
            assert self.planner.fleet.live() == []

    @invariant()
    def holds(self) -> None:
        self.planner.check()
        assert set(self.planner.switches.open) == self.open


PolicyMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPolicy = PolicyMachine.TestCase


def test_a_mode_that_there_is_not_is_refused() -> None:
    with pytest.raises(Refused, match="mode 'auto' is none of on, off, dry-run"):
        Planner(PlannerSettings(), 0.0).set_mode("auto")
