"""The placement of a prefix: what each node holds from block 0 on, and what all host memories together supply."""

from __future__ import annotations

from typing import NamedTuple

from schemas.kv import Tier
from services.directory.core import spans as sets
from services.directory.core.run import Holding, Tip, path

_L2 = Tier.L2
_NOTHING: list[int] = []


class Cover(NamedTuple):
    """Blocks [first, last) lie whole on each of `nodes`."""

    first: int
    last: int
    nodes: list[str]


class Supply(NamedTuple):
    """Leading blocks per node in L1 and in L2, and pieces that join all L2 without a gap from block 0."""

    device: dict[str, int]
    host: dict[str, int]
    covers: list[Cover]


def supply(tips: list[Tip]) -> Supply:
    """What the nodes hold of the prefix whose path from the root is `tips`.

    Each piece reaches as far as any one node allows, so there are few; nodes that hold only a part of it are not named.
    Cost: the runs of the path times the holdings that reach them.
    """
    device: dict[str, int] = {}
    host: dict[str, int] = {}
    for holding, reached in _reaches(tips, 0, 0, 0).items():
        (host if holding.tier is _L2 else device)[holding.node] = reached
    covers: list[Cover] = []
    number = start = at = 0
    nodes = host
    while nodes:
        last = max(nodes.values())
        covers.append(Cover(at, last, [node for node, reached in nodes.items() if reached == last]))
        at = last
        while number < len(tips) and start + tips[number][1] <= at:
            start, number = start + tips[number][1], number + 1
        more = _reaches(tips, number, start, at)
        nodes = {holding.node: reached for holding, reached in more.items() if holding.tier is _L2}
    return Supply(device, host, covers)


def shared(tips: list[Tip], context: Tip) -> int:
    """How many leading blocks of the prefix are also those of a context that starts at the root."""
    ends = dict(path(context))
    blocks = 0
    for run, same in tips:
        end = ends.get(run, 0)
        blocks += min(same, end)
        if same != end:
            break
    return blocks


def _reaches(tips: list[Tip], number: int, start: int, at: int) -> dict[Holding, int]:
    """How far each live holding reaches without a gap from block `at`, which lies on run `number` of the path, whose
    first block is number `start`. Those that do not hold block `at` are left out."""
    if number == len(tips):
        return {}
    run, used = tips[number]
    offset = at - start
    reached: dict[Holding, int] = {}
    through: list[Holding] = []
    for holding, held in run.held.items():
        if held[0] <= offset and holding.live:
            end = held[1] if offset < held[1] else sets.reach(held, offset)
            if end >= used:
                reached[holding] = start + used
                through.append(holding)
            elif end > offset:
                reached[holding] = start + end
    for run, more in tips[number + 1 :]:
        start, used = start + used, more
        going, through = through, []
        for holding in going:
            held = run.held.get(holding, _NOTHING)
            if held and held[0] == 0:
                reached[holding] = start + min(held[1], used)
                if held[1] >= used:
                    through.append(holding)
        if not through:
            break
    return reached
