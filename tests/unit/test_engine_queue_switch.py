"""Phase commands, drains, silent routers: waiting legs move, running ones end in place."""

import msgspec
import pytest

from schemas.phase import Phase, SwitchState
from schemas.serve import Finish
from services.engine.backend import LegKey
from tests.engine_world import ROUTER, World, request

P, P2, D = "node-0", "node-1", "node-2"


def running_and_waiting(world: World) -> None:
    """q0 and q1 are inside P's engine, q2..q4 wait there."""
    for number in range(5):
        world.pair(f"q{number}", P, D, prompt=16)
    world.enter()


def test_case_75_running_ends_in_place_and_waiting_moves() -> None:
    world = World(P, P2, D, l1_tokens=1000, max_running=8)
    running_and_waiting(world)
    at = world.now
    world.command(P, Phase.DECODE, 1)
    moved = [report.key.id for report in world.nodes[P].reports if report.finish is Finish.REQUEUED]
    assert moved == ["q2", "q3", "q4"]
    [draining] = world.nodes[P].phases
    assert (draining.state, draining.moved) == (SwitchState.DRAINING, 3)
    assert world.serve(P, request("late", Phase.PREFILL, D)).reason == "phase"
    for name in moved:
        world.pair(name, P2, D, attempt=2, room=2)
    for _ in range(20):
        world.tick(0.1)
    world.settle()
    switched = world.nodes[P].phases[-1]
    assert (switched.state, switched.epoch, switched.moved) == (SwitchState.SWITCHED, 1, 3)
    assert switched.took_s is not None
    assert 2.0 <= switched.took_s <= world.now - at
    assert switched.longest_running_s is not None
    assert switched.took_s - switched.longest_running_s <= 0.2
    answers = [world.nodes[D].finishes(f"q{n}")[-1][2] for n in range(5)]
    assert answers == [Finish.STOP] * 5
    world.assert_empty()


def test_a_stream_on_the_switching_decode_node_ends_whole() -> None:
    world = World(P, D)
    world.pair("long", P, D)
    world.enter()
    world.serve(D, request("held", Phase.DECODE, P))
    world.command(D, Phase.PREFILL, 1)
    assert world.nodes[D].finishes("held") == [(1, Phase.DECODE, Finish.REQUEUED)]
    world.settle(3.0)
    assert world.nodes[D].finishes("long") == [(1, Phase.DECODE, Finish.STOP)]
    assert world.nodes[D].phases[-1].state is SwitchState.SWITCHED
    assert world.nodes[D].dropped == 1, "device blocks that only decode used are freed after the last one"


@pytest.mark.parametrize(("phase", "dropped"), [(Phase.PREFILL, 1), (Phase.DECODE, 0), (Phase.BOTH, 0)])
def test_an_idle_node_switches_at_once(phase: Phase, dropped: int) -> None:
    world = World(P)
    world.command(P, phase, 4)
    [report] = world.nodes[P].phases
    assert (report.state, report.took_s, report.longest_running_s) == (SwitchState.SWITCHED, 0.0, None)
    assert world.nodes[P].dropped == dropped


def test_only_a_newer_epoch_is_obeyed() -> None:
    world = World(P)
    world.command(P, Phase.DECODE, 4)
    world.command(P, Phase.PREFILL, 4)
    world.command(P, Phase.PREFILL, 3)
    assert world.nodes[P].core.switch.phase is Phase.DECODE
    assert len(world.nodes[P].phases) == 1


def test_a_command_during_a_switch_replaces_it() -> None:
    world = World(P, D, l1_tokens=1000, max_running=8)
    running_and_waiting(world)
    world.command(P, Phase.DECODE, 1)
    world.tick(1.0)
    world.command(P, Phase.PREFILL, 2)
    world.settle()
    states = [(report.epoch, report.state) for report in world.nodes[P].phases]
    assert states == [(1, SwitchState.DRAINING), (2, SwitchState.SWITCHED)]
    assert world.serve(P, request("q", Phase.PREFILL, D)).accepted


def test_a_drain_gives_back_what_waits_and_lets_the_rest_end() -> None:
    world = World(P, D, l1_tokens=1000, max_running=8)
    running_and_waiting(world)
    world.perform(P, world.nodes[P].core.drain(world.now))
    world.settle()
    assert [world.nodes[P].finishes(f"q{n}")[0][2] for n in range(5)] == [Finish.HANDED_OFF] * 2 + [Finish.REQUEUED] * 3
    assert world.nodes[P].core.idle()


def test_the_requests_of_a_silent_router_are_cancelled() -> None:
    world = World(P, D, l1_tokens=1000, max_running=8)
    running_and_waiting(world)
    world.router_alive = False
    for _ in range(60):
        world.tick(0.1)
    world.settle()
    assert {world.nodes[P].finishes(f"q{n}")[0][2] for n in range(5)} == {Finish.CANCELLED}
    assert "r0 silent for 5." in world.nodes[P].reports[-1].reason
    world.assert_empty()


def test_a_router_that_started_anew_has_no_old_requests() -> None:
    world = World(P, D)
    world.pair("q", P, D)
    world.tick()
    for node in world.nodes.values():
        node.core.routers.seen(ROUTER, 2, world.now)
        world.step(node.name)
    world.router_alive = False
    world.tick(0.1)
    world.settle()
    assert world.nodes[P].finishes("q") == [(1, Phase.PREFILL, Finish.CANCELLED)]


def test_silence_during_an_outage_of_the_broker_does_not_count() -> None:
    world = World(P, D)
    world.serve(P, request("q", Phase.PREFILL, D))
    core = world.nodes[P].core
    for step in range(200):
        world.perform(P, core.step(world.now + step * 0.1, 96, listening=False))
    world.now += 20.0
    world.perform(P, core.step(world.now, 96))
    world.now += 0.5
    world.perform(P, core.step(world.now, 96))
    assert world.nodes[P].finishes("q") == []


def test_a_process_that_was_stopped_itself_does_not_blame_the_others() -> None:
    world = World(P, D)
    world.serve(P, request("q", Phase.PREFILL, D))
    world.tick()
    world.now += 30.0
    world.step(P)
    assert world.nodes[P].finishes("q") == []


def test_case_71_cancelled_prefills_leave_the_queue_at_once() -> None:
    world = World(P, D, l1_tokens=1000, max_running=16)
    for number in range(10):
        world.pair(f"q{number}", P, D, prompt=60)
    world.enter()
    inside = list(world.nodes[P].engine)
    for number in range(10):
        world.cancel(P, f"q{number}")
        world.cancel(D, f"q{number}")
    assert all(world.nodes[P].engine[key].cancelled for key in inside)
    world.pair("short", P, D, prompt=16)
    for key in inside:
        world.advance(P, key)
    world.enter()
    assert list(world.nodes[P].engine) == [LegKey("short", 1, Phase.PREFILL)]
    world.settle()
    world.assert_empty()


def test_a_decode_node_takes_a_resume_whose_other_leg_comes_there_too() -> None:
    world = World(P, D, shared_pair=True)
    world.command(P, Phase.DECODE, 1)
    world.settle()
    resume = msgspec.structs.replace(request("q", Phase.PREFILL, P), resume=True)
    assert world.serve(P, request("q", Phase.DECODE, P)).accepted
    assert world.serve(P, resume).accepted
    world.settle()
    assert (1, Phase.DECODE, Finish.STOP) in world.nodes[P].finishes("q")
    away = msgspec.structs.replace(request("r", Phase.PREFILL, D), resume=True)
    assert world.serve(P, away).reason == "phase"
    assert world.serve(P, request("s", Phase.PREFILL, P)).reason == "phase"
    world.assert_empty()
