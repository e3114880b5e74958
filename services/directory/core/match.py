"""The placement of a prefix: what each node holds from block 0 on, and what all host memories together supply."""

from __future__ import annotations

from collections import deque
from collections.abc import Container

from schemas.directory import NodeMatch, Piece
from schemas.kv import Tier
from services.directory.core import spans as sets
from services.directory.core.run import Holding, Run, Tip, path

_L2 = Tier.L2
_NOTHING: list[int] = []
FEW_HOLDINGS = 8
SIGHTS_KEPT = 1024


Supply = tuple[list[NodeMatch], list[Piece]]
"""Leading blocks per node in L1 and L2, and pieces that join all L2 without a gap from block 0."""


class Sight:
    """What live holdings have of the first `blocks` blocks of a context.

    `reached`: how far each of them goes from block 0 on; `going`: those that go all the way. `nodes` says the same by
    node, at the numbers in `place`; `piece` is the longest part that one L2 supplies, None when none does.
    """

    __slots__ = ("before", "blocks", "going", "lives", "nodes", "piece", "place", "reached")

    def __init__(self, before: Sight | None, run: Run, used: int, lives: int) -> None:
        self.before = before
        self.lives = lives
        self.reached: dict[Holding, int] = dict(before.reached) if before is not None else {}
        self.going: set[Holding] = set()
        start = before.blocks if before is not None else 0
        self.blocks: int = start + used
        for holding, held in run.held.items():
            if holding.live and held[0] == 0 and (before is None or holding in before.going):
                self.reached[holding] = start + min(held[1], used)
                if held[1] >= used:
                    self.going.add(holding)
        self.nodes = _nodes(self.reached)
        self.place = {match.node: number for number, match in enumerate(self.nodes)}
        longest = max((match.l2_blocks for match in self.nodes), default=0)
        farthest = [match.node for match in self.nodes if match.l2_blocks == longest]
        self.piece = Piece(first=0, last=longest, nodes=farthest)


class Sights:
    """Answers where a prefix lies. What many nodes hold is looked at once: runs keep what is seen from the places where
    contexts leave them (`Run.sights`) until a copy before such a place comes or goes, or a holding lives or dies."""

    def __init__(self) -> None:
        self.lives = 0
        self._kept: deque[tuple[Run, int]] = deque()

    def supply(self, tips: list[Tip]) -> Supply:
        """What the nodes hold of the prefix whose path from the root is `tips`.

        Each piece reaches as far as any one node allows, so there are few; nodes that hold only a part of it are not
        named. Cost: the runs of the path, and the holdings of the last one.
        """
        if not tips:
            return [], []
        wide = len(tips)
        while wide and len(tips[wide - 1][0].held) <= FEW_HOLDINGS:
            wide -= 1
        sight: Sight | None = None
        for run, used in tips[:wide] if wide < len(tips) else tips:
            seen = run.sights.get(used) if run.sights is not None else None
            if seen is None or seen.before is not sight or seen.lives != self.lives:
                seen = self._look(sight, run, used)
            sight = seen
        if sight is None:
            nodes, piece, total = _alone(tips)
        elif wide < len(tips):
            nodes, piece, total = _ahead(sight, tips[wide:])
        else:
            nodes, piece, total = sight.nodes, sight.piece, sight.blocks
        if piece.last == total:
            return nodes, [piece]
        return nodes, _pieces(tips, piece, total) if piece.last else []

    def _look(self, before: Sight | None, run: Run, used: int) -> Sight:
        if run.sights is None or used not in run.sights:
            self._kept.append((run, used))
            if len(self._kept) > SIGHTS_KEPT:
                self._kept.popleft()[0].forget_sights(0)  # possibly those of this very run
        if run.sights is None:
            run.sights = {}
        sight = run.sights[used] = Sight(before, run, used, self.lives)
        run.seen = max(run.seen, used)
        return sight


def shared(tips: list[Tip], known: int, context: Tip) -> int:
    """How many of the `known` leading blocks of the prefix are also those of a context that starts at the root."""
    run, end = context
    if tips and tips[-1][0] is run:
        used = tips[-1][1]
        return known - used + min(used, end)
    ends = dict(path(context))
    blocks = 0
    for run, same in tips:
        end = ends.get(run, 0)
        blocks += min(same, end)
        if same != end:
            break
    return blocks


def shortened(tips: list[Tip], blocks: int) -> list[Tip]:
    """The path of the first `blocks` blocks only."""
    left: list[Tip] = []
    for run, used in tips:
        if blocks <= 0:
            break
        left.append((run, min(used, blocks)))
        blocks -= used
    return left


def _beyond(tips: list[Tip], going: Container[Holding] | None, start: int) -> tuple[dict[Holding, int], int]:
    """How far the holdings of a path of which few hold anything reach, of those `going` (None: all live ones) that hold
    all `start` blocks before it; and where it ends."""
    reached: dict[Holding, int] = {}
    for run, used in tips:
        onward: list[Holding] = []
        for holding, held in run.held.items():
            if held[0] == 0 and (holding.live if going is None else holding in going):
                if held[1] >= used:
                    reached[holding] = start + used
                    onward.append(holding)
                else:
                    reached[holding] = start + held[1]
        start, going = start + used, onward
    return reached, start


def _ahead(sight: Sight, tips: list[Tip]) -> tuple[list[NodeMatch], Piece, int]:
    """(nodes, longest piece, blocks) of a path that goes on behind `sight`."""
    reached, total = _beyond(tips, sight.going, sight.blocks)
    if not reached:
        return sight.nodes, sight.piece, total
    nodes, place, longest, farthest = sight.nodes.copy(), sight.place, 0, list[str]()
    for holding, to in reached.items():
        node, number = holding.node, place[holding.node]
        if holding.tier is not _L2:
            nodes[number] = NodeMatch(node=node, l1_blocks=to, l2_blocks=nodes[number].l2_blocks)
            continue
        nodes[number] = NodeMatch(node=node, l1_blocks=nodes[number].l1_blocks, l2_blocks=to)
        if to >= longest:
            if to > longest:
                farthest, longest = [], to
            farthest.append(node)
    return nodes, Piece(first=0, last=longest, nodes=farthest) if farthest else sight.piece, total


def _alone(tips: list[Tip]) -> tuple[list[NodeMatch], Piece, int]:
    """(nodes, longest piece, blocks) of a path that few hold from its start on."""
    reached, total = _beyond(tips, None, 0)
    nodes = _nodes(reached)
    longest = max([match.l2_blocks for match in nodes], default=0)
    farthest = [match.node for match in nodes if match.l2_blocks == longest]
    return nodes, Piece(first=0, last=longest, nodes=farthest), total


def _nodes(reached: dict[Holding, int]) -> list[NodeMatch]:
    """What holdings reach, by node."""
    device = {holding.node: to for holding, to in reached.items() if holding.tier is not _L2}
    host = {holding.node: to for holding, to in reached.items() if holding.tier is _L2}
    nodes = host | device if device else host
    return [NodeMatch(node=node, l1_blocks=device.get(node, 0), l2_blocks=host.get(node, 0)) for node in nodes]


def _pieces(tips: list[Tip], piece: Piece, total: int) -> list[Piece]:
    """The pieces that go on from the first one."""
    pieces = [piece]
    number = start = 0
    while (at := pieces[-1].last) < total:
        while start + tips[number][1] <= at:
            start, number = start + tips[number][1], number + 1
        reached = _reaches(tips, number, start, at)
        if not reached:
            break
        last = max(reached.values())
        pieces.append(Piece(first=at, last=last, nodes=[node for node, to in reached.items() if to == last]))
    return pieces


def _reaches(tips: list[Tip], number: int, start: int, at: int) -> dict[str, int]:
    """How far each L2 goes without a gap from block `at`, which lies on run `number` of the path, whose first block is
    number `start`. Those that do not hold block `at` are left out."""
    run, used = tips[number]
    offset = at - start
    reached: dict[str, int] = {}
    through: list[Holding] = []
    for holding, held in run.held.items():
        if held[0] <= offset and holding.live and holding.tier is _L2:
            end = held[1] if offset < held[1] else sets.reach(held, offset)
            if end >= used:
                reached[holding.node] = start + used
                through.append(holding)
            elif end > offset:
                reached[holding.node] = start + end
    for run, more in tips[number + 1 :]:
        start, used = start + used, more
        going, through = through, []
        for holding in going:
            held = run.held.get(holding, _NOTHING)
            if held and held[0] == 0:
                reached[holding.node] = start + min(held[1], used)
                if held[1] >= used:
                    through.append(holding)
        if not through:
            break
    return reached
