"""The splits that could be ordered, and which nodes would switch for each."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np

from schemas.phase import Phase, Split
from services.planner.core.fleet import Node
from services.planner.core.model_rows import Matrix
from services.planner.core.moves import Move, Refused, moves_for_split


@dataclass(frozen=True, slots=True)
class Candidate:
    """A split, the moves that make it (least work first; none for the split now), and every node's phase in it."""

    split: Split
    moves: tuple[Move, ...]
    phases: tuple[Phase, ...]

    @property
    def nodes(self) -> list[str]:
        return [move.node for move in self.moves]


def candidates(nodes: Sequence[Node], pinned: AbstractSet[str]) -> list[Candidate]:
    """Every split that leaves each phase a node and can be made without moving a pinned one, by prefill nodes."""
    found: list[Candidate] = []
    for prefill in range(1, len(nodes)):
        split = Split(prefill, len(nodes) - prefill)
        try:
            moves = moves_for_split(nodes, split, pinned)
        except Refused:
            continue
        new = {move.node: move.new for move in moves}
        found.append(Candidate(split, tuple(moves), tuple(new.get(node.name, node.phase) for node in nodes)))
    return found


def masks(phases: Sequence[Sequence[Phase]]) -> tuple[Matrix, Matrix]:
    """(serves prefill, serves decode), each (candidates, nodes) of 0 and 1."""
    prefill = np.array([[phase.serves(Phase.PREFILL) for phase in row] for row in phases], dtype=float)
    decode = np.array([[phase.serves(Phase.DECODE) for phase in row] for row in phases], dtype=float)
    return prefill, decode
