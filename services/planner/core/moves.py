"""Which nodes change phase for a wanted split, and which orders are refused."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from schemas.phase import Phase, Split
from services.planner.core.fleet import Node, view_of


class Refused(Exception):
    """An order that will not be carried out; the text names the value and the limit."""


@dataclass(frozen=True, slots=True)
class Move:
    """One node's change of phase."""

    node: str
    old: Phase
    new: Phase


def _cost(node: Node, leaves: Phase) -> tuple[int, int, str]:
    """The work a switch moves: running requests of the phase it leaves, then referenced KV; names break ties."""
    return node.running_of(leaves), node.referenced_tokens, node.name


def _other(phase: Phase) -> Phase:
    return Phase.DECODE if phase is Phase.PREFILL else Phase.PREFILL


def _cheapest(nodes: Sequence[Node], count: int, to: Phase, pinned: AbstractSet[str]) -> list[Node]:
    """The `count` unpinned nodes whose switch to `to` moves the least work."""
    free = [node for node in nodes if node.name not in pinned]
    if len(free) < count:
        names = ", ".join(sorted(node.name for node in nodes if node.name in pinned))
        raise Refused(
            f"{count} nodes would have to switch to {to}, {len(free)} of {len(nodes)} are not pinned ({names})"
        )
    return sorted(free, key=lambda node: _cost(node, _other(to)))[:count]


def moves_for_split(nodes: Sequence[Node], target: Split, pinned: AbstractSet[str]) -> list[Move]:
    """The moves that turn the split of `nodes` into `target`, as few as possible; [] when it is the split already.

    Raises `Refused`: a phase left without a node, another number of nodes than live, or too many pinned ones.
    """
    now = view_of(node.phase for node in nodes)
    if target.prefill < 1 or target.decode < 1:
        raise Refused(f"split {target} leaves a phase without a node; each needs at least 1 (now {now})")
    if target.prefill + target.decode != len(nodes):
        wanted = target.prefill + target.decode
        raise Refused(f"split {target} is {wanted} nodes, {len(nodes)} are live (now {now})")
    of = {phase: [node for node in nodes if node.phase is phase] for phase in Phase}
    chosen: list[tuple[Node, Phase]] = []
    for phase, count in ((Phase.PREFILL, target.prefill), (Phase.DECODE, target.decode)):
        surplus = len(of[phase]) - count
        if surplus > 0:
            chosen += [(node, _other(phase)) for node in _cheapest(of[phase], surplus, _other(phase), pinned)]
    chosen += _collocated(of[Phase.BOTH], target.prefill - len(of[Phase.PREFILL]), pinned)
    return [Move(node.name, node.phase, to) for node, to in sorted(chosen, key=lambda item: item[0].name)]


def _collocated(nodes: Sequence[Node], to_prefill: int, pinned: AbstractSet[str]) -> list[tuple[Node, Phase]]:
    """Every `both` node takes one phase; those with the least decode work take prefill."""
    if not nodes:
        return []
    prefill = _cheapest(nodes, max(0, min(to_prefill, len(nodes))), Phase.PREFILL, pinned)
    names = {node.name for node in prefill}
    rest = [node for node in nodes if node.name not in names]
    decode = _cheapest(rest, len(rest), Phase.DECODE, pinned)
    return [(node, Phase.PREFILL) for node in prefill] + [(node, Phase.DECODE) for node in decode]


def move_of_phase(nodes: Sequence[Node], name: str, phase: Phase, pinned: AbstractSet[str]) -> list[Move]:
    """The move of one node by hand; [] when it serves `phase` already.

    Raises `Refused`: an unknown or pinned node, or the last one that serves a phase.
    """
    node = next((node for node in nodes if node.name == name), None)
    if node is None:
        known = ", ".join(node.name for node in nodes) or "none"
        raise Refused(f"node {name!r} is not live; live nodes: {known}")
    if node.phase is phase:
        return []
    if name in pinned:
        raise Refused(f"node {name!r} is pinned to {node.phase}")
    now = view_of(other.phase for other in nodes)
    then = view_of(phase if other.name == name else other.phase for other in nodes)
    for kind in (Phase.PREFILL, Phase.DECODE):
        if then.serving(kind) == 0 < now.serving(kind):
            raise Refused(f"node {name!r} is the last that serves {kind}: {now} would become {then}")
    return [Move(name, node.phase, phase)]
