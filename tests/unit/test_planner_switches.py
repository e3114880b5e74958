"""A switch from order to report: durations, losses, dead nodes, foreign commands, restarts of the planner."""

import pytest

from schemas.phase import Decision, Phase, PhaseCommand, PhaseState, Split, SwitchState
from schemas.telemetry import KvUse, NodeTelemetry, RequestTelemetry, TierUse
from services.planner.core.moves import Refused
from services.planner.core.policy import Planner, PlannerSettings, Report
from services.planner.core.switches import lost_reuse

USE = TierUse(used=0, total=100)
SETTINGS = PlannerSettings(settle_s=0.2, switch_timeout_s=30, node_timeout_s=3, block_size=4)


def beat(node: str, phase: Phase, epoch: int = 0, *, engine: int = 1) -> NodeTelemetry:
    return NodeTelemetry(
        node=node,
        t=0.0,
        incarnation=1,
        phase=phase,
        epoch=epoch,
        waiting=0,
        running=0,
        kv=KvUse(l1=USE, l2=USE),
        last_kv_seq=0,
        engine_incarnation=engine,
    )


def planner_of(**phases: Phase) -> Planner:
    planner = Planner(SETTINGS, 0.0)
    for name, phase in phases.items():
        planner.heard(beat(name, phase), 0.0)
    return planner


def switched(node: str, phase: Phase, epoch: int, took_s: float = 0.1) -> PhaseState:
    return PhaseState(id="s", t=0.0, node=node, phase=phase, epoch=epoch, state=SwitchState.SWITCHED, took_s=took_s)


def ended(outcome: str = "ok", prompt: int = 41, ideal: int = 40, cached: int = 20) -> RequestTelemetry:
    return RequestTelemetry(
        id="t",
        t=0.0,
        request="r",
        branch=None,
        version=None,
        outcome=outcome,
        t_arrive=0.0,
        t_end=0.0,
        prompt_tokens=prompt,
        cached_tokens=cached,
        ideal_tokens=ideal,
    )


def test_a_switch_lasts_until_its_last_node_and_counts_what_was_lost() -> None:
    planner = planner_of(a=Phase.PREFILL, b=Phase.PREFILL, c=Phase.PREFILL, d=Phase.DECODE)
    order = planner.order_split(Split.parse("1P3D"), "d1", 1.0)
    assert [(c.node, c.phase, c.epoch) for c in order.commands] == [("a", Phase.DECODE, 1), ("b", Phase.DECODE, 1)]
    assert (order.split_now, order.split_new) == ("3P1D", "1P3D")
    planner.phase_state(switched("a", Phase.DECODE, 1), 1.5)
    planner.request_ended(ended(), 1.6)
    planner.request_ended(ended("error"), 1.7)
    planner.request_ended(ended("cancelled"), 1.7)
    assert planner.tick(1.9) == Report([], [], [])
    planner.phase_state(switched("b", Phase.DECODE, 1), 3.0)
    planner.request_ended(ended(cached=36), 3.1)
    (switch,) = planner.tick(3.2).switches
    assert switch.took_s == 2.0
    assert (switch.lost_tokens, switch.failed, switch.problems) == (24, 1, [])
    planner.check()


@pytest.mark.parametrize(
    ("prompt", "ideal", "cached", "lost"), [(41, 44, 0, 40), (40, 40, 36, 0), (1, 4, 0, 0), (9, 8, 8, 0)]
)
def test_the_last_prompt_token_is_never_lost_reuse(prompt: int, ideal: int, cached: int, lost: int) -> None:
    assert lost_reuse(ended(prompt=prompt, ideal=ideal, cached=cached), block_size=4) == lost


def test_a_node_that_falls_silent_ends_its_part_by_name() -> None:
    planner = planner_of(a=Phase.PREFILL, b=Phase.PREFILL, c=Phase.DECODE)
    planner.order_phase("a", Phase.DECODE, "d1", 0.5)
    planner.heard(beat("b", Phase.PREFILL), 3.4)
    report = planner.tick(3.6)
    assert report.silent == ["a", "c"]
    assert report.switches == []
    (switch,) = planner.tick(4.0).switches
    assert switch.problems == ["a: silent for 3 s"]


def test_an_engine_started_anew_ends_its_part() -> None:
    planner = planner_of(a=Phase.PREFILL, b=Phase.PREFILL, c=Phase.DECODE)
    planner.order_phase("a", Phase.DECODE, "d1", 0.5)
    planner.heard(beat("a", Phase.PREFILL, engine=2), 1.0)
    (switch,) = planner.tick(1.2).switches
    assert switch.problems == ["a: its engine was started anew during the switch"]


def test_a_drain_beyond_the_timeout_is_reported_and_leaves_the_reported_split() -> None:
    planner = planner_of(a=Phase.PREFILL, b=Phase.PREFILL, c=Phase.DECODE)
    planner.order_phase("a", Phase.DECODE, "d1", 0.0)
    done = []
    for second in range(1, 32):
        for name, phase, epoch in (("a", Phase.DECODE, 1), ("b", Phase.PREFILL, 0), ("c", Phase.DECODE, 0)):
            planner.heard(beat(name, phase, epoch), second)
        done += [(second, switch) for switch in planner.tick(second).switches]
    ((reported_at, switch),) = done
    assert reported_at == 31
    assert switch.problems == ["a: old phase still runs after 30 s"]
    assert str(planner.fleet.split()) == "1P2D"


def test_case_85_a_change_by_another_hand_is_seen_in_heartbeats() -> None:
    planner = planner_of(a=Phase.PREFILL, b=Phase.PREFILL, c=Phase.DECODE)
    planner.heard(beat("b", Phase.DECODE, epoch=7), 1.0)
    assert str(planner.fleet.split()) == "1P2D"
    order = planner.order_split(Split.parse("2P1D"), "d1", 1.1)
    assert [(c.node, c.epoch) for c in order.commands] == [("b", 8)]


def test_case_85_of_two_planners_the_one_whose_command_was_stored_leads() -> None:
    planner = planner_of(a=Phase.PREFILL, b=Phase.PREFILL, c=Phase.DECODE)
    planner.order_phase("a", Phase.DECODE, "ours", 1.0)
    other = PhaseCommand(id="x", t=0.0, node="a", phase=Phase.BOTH, epoch=1, reason="", decision_id="theirs")
    planner.command_seen(other, 1.1)
    (switch,) = planner.tick(1.4).switches
    assert switch.problems == ["a: overtaken by decision theirs of another planner"]
    assert str(planner.fleet.split()) == "1P1D+1both"


def test_a_restarted_planner_takes_epochs_from_the_stream_and_pins_from_the_last_decision() -> None:
    planner = Planner(SETTINGS, 0.0)
    planner.command_seen(
        PhaseCommand(id="x", t=0.0, node="a", phase=Phase.DECODE, epoch=9, reason="", decision_id="old"), 0.0
    )
    last = Decision(id="old", t=0.0, split_now="1P2D", applied=True, why="", pinned=["b"], mode="off")
    planner.decision_seen(last, 0.0)
    for name, phase, epoch in (("a", Phase.DECODE, 9), ("b", Phase.DECODE, 3), ("c", Phase.PREFILL, 0)):
        planner.heard(beat(name, phase, epoch), 1.0)
    order = planner.order_split(Split.parse("2P1D"), "d1", 1.1)
    assert [(c.node, c.phase, c.epoch) for c in order.commands] == [("a", Phase.PREFILL, 10)]


def test_an_order_on_its_way_counts_before_the_next_heartbeat() -> None:
    planner = planner_of(a=Phase.PREFILL, b=Phase.PREFILL, c=Phase.DECODE)
    planner.order_phase("a", Phase.DECODE, "d1", 0.1)
    with pytest.raises(Refused, match="last that serves prefill: 1P2D would become 0P3D"):
        planner.order_phase("b", Phase.DECODE, "d2", 0.2)


def test_a_later_order_takes_the_node_from_the_earlier_one() -> None:
    planner = planner_of(a=Phase.PREFILL, b=Phase.PREFILL, c=Phase.DECODE)
    planner.order_phase("a", Phase.DECODE, "d1", 0.1)
    planner.order_phase("a", Phase.PREFILL, "d2", 0.2)
    planner.phase_state(switched("a", Phase.PREFILL, 2), 0.3)
    done = planner.tick(0.6).switches
    assert [(s.decision_id, s.problems) for s in done] == [("d1", ["a: overtaken by decision d2"]), ("d2", [])]


def test_commands_that_did_not_reach_the_stream_leave_the_split() -> None:
    planner = planner_of(a=Phase.PREFILL, b=Phase.PREFILL, c=Phase.DECODE)
    order = planner.order_phase("a", Phase.DECODE, "d1", 0.1)
    planner.withdraw(order, "the broker is away", 0.2)
    assert str(planner.fleet.split()) == "2P1D"
    (switch,) = planner.tick(0.5).switches
    assert switch.problems == ["a: the broker is away"]
    assert planner.order_phase("a", Phase.DECODE, "d2", 0.6).commands[0].epoch == 2
