"""Choices over all nodes at once: decode placement, queue order in the prediction, learned times, liveness."""

import msgspec
import numpy as np
import pytest

from schemas.directory import MatchReply, NodeMatch, Piece
from schemas.iteration_model import IterationModel
from schemas.phase import Phase, PhaseCommand
from services.router.core.load import Booking, Ledger
from services.router.core.nodes import Nodes
from services.router.core.placement import FetchCost, Prompt
from services.router.core.placer import Placer
from services.router.core.timing import Coefficients, coefficients_of
from tests.property.test_router_prefixes import BLOCK
from tests.property.test_router_sweep import node

MODEL = Coefficients(c0=0.1, c1=1e-4, d0=0.01, d1=0.0, d2=0.001, expert_share=0.0, fed_tokens=1.0)
NOTHING = MatchReply(blocks=0)


def placer(*names: str, handoff: float = 1e4, order_weight: float = 0.0, phase: Phase = Phase.BOTH) -> Placer:
    nodes = Nodes(3.0)
    made = Placer(nodes, Ledger(100.0, order_weight), MODEL, FetchCost(1e6, 0.001), FetchCost(handoff, 0.0))
    for name in names:
        one = node(name, 0, 0, 10_000, phase)
        assert one.hello is not None
        assert one.telemetry is not None
        nodes.on_hello(one.hello, 0.0)
        nodes.on_telemetry(one.telemetry, 0.0)
        made.changed(name)
    made.check()
    return made


def decode(made: Placer, match: MatchReply = NOTHING, tokens: int = 400, prefill: str = "?", turn: int = 0) -> str:
    return made.choose_decode(match, tokens, made.serving(Phase.DECODE, (), 0.0), prefill, turn)


def test_decode_goes_to_the_shortest_iteration() -> None:
    made = placer("a", "b", "c")
    made.ledger.set("x", [Booking(Phase.DECODE, "a", tokens=10)])
    made.ledger.set("y", [Booking(Phase.DECODE, "b", tokens=10)])
    assert decode(made) == "c"


def test_decode_goes_where_the_branch_already_lies_unless_it_is_busy() -> None:
    made = placer("a", "b", handoff=2000.0)
    match = MatchReply(blocks=20, nodes=[NodeMatch(node="b", l1_blocks=20, l2_blocks=0)])
    made.ledger.set("x", [Booking(Phase.DECODE, "b", tokens=10)])
    assert decode(made, match) == "b"
    for number in range(3):
        made.ledger.set(f"y{number}", [Booking(Phase.DECODE, "b", tokens=10)])
    assert decode(made, match) == "a"


def test_decode_stays_on_the_prefill_node_among_equals_and_else_takes_turns() -> None:
    made = placer("a", "b", "c")
    assert decode(made, prefill="b") == "b"
    assert [decode(made, turn=turn) for turn in range(4)] == ["a", "b", "c", "a"]


def test_without_room_the_least_promised_node_is_taken() -> None:
    made = placer("a", "b")
    made.ledger.set("x", [Booking(Phase.DECODE, "a", tokens=900)])
    made.ledger.set("y", [Booking(Phase.DECODE, "b", tokens=700)])
    assert decode(made, tokens=500) == "b"
    made.ledger.set("y", [])
    assert decode(made, tokens=500) == "b"


def test_the_queue_before_a_request_is_what_will_go_before_it() -> None:
    made = placer("a", order_weight=2.0)
    made.ledger.set("long", [Booking(Phase.PREFILL, "a", service_s=5.0, placed=0.0)])
    made.ledger.set("short", [Booking(Phase.PREFILL, "a", service_s=0.2, placed=0.0)])
    index = {"a": 0}
    assert made.ledger.waits(index, np.array([0.5]), 1.0)[1].tolist() == [0.2]
    assert made.ledger.waits(index, np.array([0.5]), 9.5)[1].tolist() == [5.2]
    assert made.ledger.waits(index, np.array([6.0]), 1.0)[1].tolist() == [5.2]


def test_a_busy_node_is_passed_over_and_avoided_ones_only_while_there_are_others() -> None:
    made = placer("a", "b")
    made.ledger.set("x", [Booking(Phase.PREFILL, "a", service_s=1.0)])
    prompt = Prompt(100, BLOCK, NOTHING)
    assert made.predict(prompt, made.serving(Phase.PREFILL, (), 0.0), 0.0).best(0).node == "b"
    assert made.predict(prompt, made.serving(Phase.PREFILL, ("b",), 0.0), 0.0).best(0).node == "a"
    assert made.serving(Phase.PREFILL, ("a", "b"), 0.0).all()


def test_commands_and_silence_take_nodes_out() -> None:
    made = placer("a", "b")
    told = PhaseCommand(id="c", t=0.0, node="a", phase=Phase.DECODE, epoch=1, reason="", decision_id="d")
    made.nodes.on_command(told)
    made.changed("a")
    assert made.serving(Phase.PREFILL, (), 0.0).tolist() == [False, True]
    assert made.serving(Phase.DECODE, (), 0.0).tolist() == [True, True]
    assert not made.serving(Phase.DECODE, (), 99.0).any()


def test_learned_times_take_the_place_of_the_configured_ones() -> None:
    made = placer("a", "b")
    slow = IterationModel(node="a", c0=3.0, c1=1e-3, prefill_windows=10, uncached_per_iteration=None)
    made.learned({"a": coefficients_of(slow, MODEL)})
    prompt = Prompt(100, BLOCK, NOTHING)
    by_node = {found.node: found for found in made.predict(prompt, made.serving(Phase.PREFILL, (), 0.0), 0.0)}
    assert by_node["a"].service_s == pytest.approx(3.1)
    assert by_node["b"].service_s == pytest.approx(0.11, rel=1e-4)
    assert coefficients_of(slow, MODEL).d0 == MODEL.d0
    assert coefficients_of(IterationModel(node="a", d0=0.5, decode_windows=1), MODEL).d0 == 0.5


def resumed(running: int, queue_s: float, left: int = 20, room: int = 10_000) -> str:
    """Which node prefills a prompt of 400 tokens of which a decode node's device holds all but `left`."""
    nodes = Nodes(3.0)
    made = Placer(nodes, Ledger(100.0), MODEL, FetchCost(1e6, 0.001), FetchCost(1e4, 0.0), resume_tokens=64)
    for name, phase in (("p", Phase.PREFILL), ("d", Phase.DECODE)):
        one = node(name, 0, 0, 10_000, phase)
        assert one.hello is not None
        assert one.telemetry is not None
        capacities = msgspec.structs.replace(one.hello.capacities, l1_tokens=room, running=32)
        nodes.on_hello(msgspec.structs.replace(one.hello, capacities=capacities), 0.0)
        nodes.on_telemetry(one.telemetry, 0.0)
        made.changed(name)
    made.ledger.set("x", [Booking(Phase.PREFILL, "p", service_s=queue_s)])
    for number in range(running):
        made.ledger.set(str(number), [Booking(Phase.DECODE, "d", tokens=10)])
    match = MatchReply(
        blocks=24,
        pieces=[Piece(first=0, last=24, nodes=["d"])],
        nodes=[NodeMatch(node="d", l1_blocks=(400 - left) // BLOCK, l2_blocks=24)],
    )
    prefill, decode_rows = made.serving(Phase.PREFILL, (), 0.0), made.serving(Phase.DECODE, (), 0.0)
    best = made.predict(Prompt(400, BLOCK, match), prefill, 0.0, decode_rows).best(0)
    assert best.resume == (best.node == "d")
    return best.node


def test_a_short_resume_is_prefilled_where_the_branch_decodes_when_that_is_sooner() -> None:
    assert resumed(running=2, queue_s=5.0) == "d"
    assert resumed(running=2, queue_s=0.0) == "p"


def test_the_delay_of_those_who_decode_there_counts() -> None:
    assert resumed(running=3, queue_s=0.5) == "d"
    assert resumed(running=20, queue_s=0.5) == "p"


def test_long_prefills_and_full_nodes_do_not_resume() -> None:
    assert resumed(running=2, queue_s=5.0, left=120) == "p"
    assert resumed(running=2, queue_s=5.0, room=700) == "p"
