"""Which blocks the cluster can still reach: copies of all nodes together cover the context from its first block on.

A piece beyond a hole is of no use until the hole is filled, so pools let it go before everything else.
"""

from __future__ import annotations

from schemas.kv import Tier
from services.directory.core import spans as sets
from services.directory.core.announcements import Announcements
from services.directory.core.prefix_tree import PrefixTree
from services.directory.core.run import Holding, Run
from services.directory.core.spans import Spans


class Reachability:
    """Keeps `reach` of every run. What a change means for the run itself is booked at once; what it means for the runs
    below waits in `stale`, to be worked off by `step`."""

    def __init__(self, tree: PrefixTree, announcements: Announcements) -> None:
        self.stale: dict[Run, None] = {}
        self._tree = tree
        self._announcements = announcements
        tree.on_attach.append(self.recheck)

    def recheck(self, run: Run) -> None:
        """Something about the run or above it is not as booked."""
        self.stale[run] = None

    def grown(self, holding: Holding, run: Run, new: Spans) -> None:
        """A live holding got `new` blocks; to be called before they are booked as copies."""
        if new[0] <= run.reach < new[-1] and self._based(run):
            if len(run.held) == 1 and run.forks.top <= run.reach == new[0] and run.held[holding][-1] == new[1]:
                run.reach = new[1]
                return
            self._set(run, _covered(run, sets.reach(run.held[holding], run.reach)), holding, new)

    def shrunk(self, run: Run, gone: Spans) -> None:
        """A live holding lost these blocks."""
        if gone[0] < run.reach:
            self._set(run, min(run.reach, _covered(run, gone[0])))

    def step(self) -> bool:
        """Bring one stale run up to date; whether there was one."""
        if not self.stale:
            return False
        run, _ = self.stale.popitem()
        if run.keys:
            self._set(run, _covered(run, 0) if self._based(run) else 0)
        return True

    def _based(self, run: Run) -> bool:
        """Whether the block before the run is reachable."""
        parent = run.parent
        return parent is not None and (parent is self._tree.root or parent.reach >= run.offset)

    def _set(self, run: Run, reach: int, holding: Holding | None = None, new: Spans | None = None) -> None:
        """Book a new reach; of copies in between the pools are told, but for `new` ones that are still to be booked."""
        first, last = sorted((run.reach, reach))
        if first == last:
            return
        lost = reach < run.reach
        run.reach = reach
        for place, held in run.held.items():
            if place.tier is Tier.L2:
                between = sets.both(held, [first, last])
                if place is holding and new is not None:
                    between = sets.minus(between, new)
                if between:
                    self._announcements.reached(place, run, between, lost=lost)
        if run.forks.top > first:
            self.stale |= {child: None for child in run.children.values() if first < child.offset <= last}

    def check(self) -> None:
        """Assert the definition of `reach` for every run; only when nothing is stale."""
        assert not self.stale
        for run in self._tree.known():
            expected = _covered(run, 0) if self._based(run) else 0
            assert run.reach == expected, f"run {run.ident} reaches {run.reach}, not {expected}"


def _covered(run: Run, at: int) -> int:
    """The first offset from `at` on that no live holding covers."""
    moved = True
    while moved:
        moved = False
        for holding, held in run.held.items():
            if holding.live and (end := sets.reach(held, at)) > at:
                at, moved = end, True
    return at
