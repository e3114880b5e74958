"""The placement of a prefix: what each node holds from block 0 on, and what all host memories together supply."""

from __future__ import annotations

from typing import NamedTuple

from schemas.kv import Tier
from services.directory.core import spans as sets
from services.directory.core.run import Holding, Tip, path


class Cover(NamedTuple):
    """Blocks [first, last) lie whole on each of `nodes`."""

    first: int
    last: int
    nodes: list[str]


def supply(tips: list[Tip]) -> tuple[dict[str, int], dict[str, int], list[Cover]]:
    """Leading blocks per node in L1 and in L2, and pieces that join all L2 without a gap from block 0.

    `tips` is the path of the prefix from the root. Each piece reaches as far as any one node allows, so there are few;
    nodes that hold only a part of it are not named. Cost: the runs of the path times the holdings that reach them.
    """
    device = _leads(tips, 0, 0, Tier.L1)
    host = _leads(tips, 0, 0, Tier.L2)
    covers: list[Cover] = []
    leads, at = host, 0
    number, start = 0, 0
    while leads:
        last = max(leads.values())
        covers.append(Cover(at, last, sorted(holding.node for holding, reached in leads.items() if reached == last)))
        at = last
        while number < len(tips) and start + tips[number][1] <= at:
            start, number = start + tips[number][1], number + 1
        leads = _leads(tips, number, start, Tier.L2, at)
    return _by_node(device), _by_node(host), covers


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


def _leads(tips: list[Tip], number: int, start: int, tier: Tier, at: int = 0) -> dict[Holding, int]:
    """How far each live holding reaches without a gap from block `at`, which lies on run `number` of the path, whose
    first block is number `start`. Those that do not hold block `at` are left out."""
    reached: dict[Holding, int] = {}
    active: list[Holding] | None = None
    for run, used in tips[number:]:
        offset = max(0, at - start)
        if active is None:
            active = [holding for holding in run.held if holding.live and holding.tier is tier]
        through: list[Holding] = []
        for holding in active:
            held = run.held.get(holding)
            end = min(used, sets.reach(held, offset)) if held else 0
            if end > offset:
                reached[holding] = start + end
                if end == used:
                    through.append(holding)
        if not through:
            break
        active = through
        start += used
    return reached


def _by_node(leads: dict[Holding, int]) -> dict[str, int]:
    return {holding.node: reached for holding, reached in leads.items()}
