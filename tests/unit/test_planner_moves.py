"""Which nodes an order moves, and what it refuses."""

import pytest

from schemas.phase import Phase, Split
from services.planner.core.fleet import Node, view_of
from services.planner.core.moves import Refused, move_of_phase, moves_for_split

P, D, BOTH = Phase.PREFILL, Phase.DECODE, Phase.BOTH


def node(name: str, phase: Phase, *, prefill: int = 0, decode: int = 0, referenced: int = 0) -> Node:
    return Node(name, phase, 0, 1, prefill, decode, 0, referenced, heard_at=0.0)


def moved(nodes: list[Node], split: str, pinned: frozenset[str] = frozenset()) -> dict[str, Phase]:
    return {move.node: move.new for move in moves_for_split(nodes, Split.parse(split), pinned)}


def test_fewest_running_requests_of_the_phase_it_leaves_move_first() -> None:
    nodes = [node("a", P, prefill=3), node("b", P, prefill=1, decode=9), node("c", P, prefill=2), node("d", D)]
    assert moved(nodes, "2P2D") == {"b": D}


def test_least_referenced_kv_decides_between_equally_busy_nodes() -> None:
    nodes = [node("a", P, referenced=500), node("b", P, referenced=100), node("c", D)]
    assert moved(nodes, "1P2D") == {"b": D}


def test_the_name_breaks_ties() -> None:
    assert moved([node("b", P), node("a", P), node("c", D)], "1P2D") == {"a": D}


def test_a_reached_split_moves_nothing() -> None:
    assert moved([node("a", P), node("b", D)], "1P1D") == {}


def test_a_pinned_node_is_never_chosen() -> None:
    nodes = [node("a", P), node("b", P, prefill=50), node("c", D)]
    assert moved(nodes, "1P2D", frozenset({"a"})) == {"b": D}


def test_too_many_pinned_nodes_are_refused_with_both_numbers() -> None:
    nodes = [node("a", P), node("b", P), node("c", D)]
    with pytest.raises(Refused, match=r"1 nodes would have to switch to decode, 0 of 2 are not pinned \(a, b\)"):
        moved(nodes, "1P2D", frozenset({"a", "b"}))


@pytest.mark.parametrize("split", ["0P3D", "3P0D"])
def test_a_split_without_one_phase_is_refused(split: str) -> None:
    with pytest.raises(
        Refused, match=rf"split {split} leaves a phase without a node; each needs at least 1 \(now 2P1D\)"
    ):
        moved([node("a", P), node("b", P), node("c", D)], split)


def test_a_split_of_another_number_of_nodes_is_refused() -> None:
    with pytest.raises(Refused, match=r"split 2P2D is 4 nodes, 3 are live \(now 2P1D\)"):
        moved([node("a", P), node("b", P), node("c", D)], "2P2D")


def test_collocated_nodes_take_the_phase_whose_switch_moves_the_least() -> None:
    nodes = [node("a", BOTH, decode=4), node("b", BOTH, decode=1), node("c", BOTH, decode=2)]
    assert moved(nodes, "2P1D") == {"a": D, "b": P, "c": P}


def test_one_node_by_hand() -> None:
    nodes = [node("a", P), node("b", P), node("c", D)]
    assert [move.new for move in move_of_phase(nodes, "a", BOTH, frozenset())] == [BOTH]
    assert move_of_phase(nodes, "a", P, frozenset()) == []


@pytest.mark.parametrize(
    ("name", "phase", "text"),
    [
        ("c", P, r"node 'c' is the last that serves decode: 2P1D would become 3P0D"),
        ("x", P, r"node 'x' is not live; live nodes: a, b, c"),
        ("b", D, r"node 'b' is pinned to prefill"),
    ],
)
def test_orders_of_one_node_that_are_refused(name: str, phase: Phase, text: str) -> None:
    nodes = [node("a", P), node("b", P), node("c", D)]
    with pytest.raises(Refused, match=text):
        move_of_phase(nodes, name, phase, frozenset({"b"}))


def test_a_collocated_node_keeps_both_phases_served() -> None:
    nodes = [node("a", BOTH), node("b", P)]
    with pytest.raises(Refused, match=r"last that serves decode: 1P0D\+1both would become 2P0D"):
        move_of_phase(nodes, "a", P, frozenset())
    assert str(view_of(one.phase for one in nodes)) == "1P0D+1both"
