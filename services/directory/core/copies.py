"""Copies that come, leave and move between tiers, brought to everything that depends on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from schemas.directory import AbsenceReason
from schemas.kv import LocationChange, Tier
from services.directory.core import absence
from services.directory.core.announcements import Announcements
from services.directory.core.counters import Counters
from services.directory.core.prefix_tree import PrefixTree
from services.directory.core.reachability import Reachability
from services.directory.core.references import References
from services.directory.core.run import Holding, Run, keys_view
from services.directory.core.spans import Spans

Holdings = dict[Tier, Holding]


class Copies:
    """Applies location changes to the holdings of one node. A holding that dies is out of sight at once; `sweep` then
    takes it out of its runs, one a step. Each of `on_copy` is called with what came to an L2 holding or is
    said again."""

    def __init__(
        self,
        tree: PrefixTree,
        references: References,
        reachability: Reachability,
        announcements: Announcements,
        counters: Counters,
    ) -> None:
        self._tree = tree
        self._references = references
        self._reachability = reachability
        self._announcements = announcements
        self._counters = counters
        self.on_copy: list[Callable[[Holding, Run, Spans], None]] = []

    def stored(self, change: LocationChange, packed: bytes, holdings: Holdings) -> Run | None:
        """The blocks of these packed keys came as `change` says, or moved; the orphan that this made or met because
        their parent is unknown, if any."""
        holding, stays = holdings[change.tier], change.origin is None or change.origin is change.tier
        if stays and not change.media and packed:
            extended = self._tree.extend(holding, change.parent, packed)
            if extended is not None:
                run, first = extended
                self._came(holding, run, [first, len(run.keys)])
                return None
        keys = keys_view(packed)
        if change.media:
            agreed = self._tree.media.agreeing(keys, change.media, self._tree.is_held)
            self._counters.conflicting_media += agreed < len(keys)
            keys = keys[:agreed]
        if not keys:
            return None
        inserted = self._tree.insert(change.parent, keys)
        if change.media:
            self._tree.media.note(keys, change.media)
        for run, first, last in inserted.pieces:
            self._hold(holding, run, first, last)
        if change.origin is not None and not stays:
            for piece in inserted.pieces:
                self._drop(holdings[change.origin], *piece)
        return inserted.orphan

    def removed(self, tier: Tier, packed: bytes, holdings: Holdings) -> None:
        """The blocks of these packed keys left."""
        pieces, unknown = self._tree.locate(keys_view(packed))
        self._counters.unknown_removed_blocks += unknown
        for piece in pieces:
            self._drop(holdings[tier], *piece)

    def revive(self, holding: Holding) -> None:
        """From now on what this holding has is seen."""
        holding.live = True
        self._tree.sights.lives += 1

    def bury(self, holding: Holding, reason: AbsenceReason | None) -> None:
        """From now on what this holding had is out of sight; None for what never was in sight."""
        holding.live, holding.ended = False, reason
        self._tree.sights.lives += 1

    def sweep(self, holding: Holding) -> Iterator[None]:
        """Take a dead holding out of its runs."""
        while holding.runs:
            run = holding.runs.pop()
            blocks = run.held.pop(holding)
            if holding.ended is not None:
                absence.note(run, blocks, holding.ended)
            self._reachability.recheck(run)
            self._tree.settle(run)
            yield

    def reach(self, holding: Holding) -> Iterator[None]:
        """A holding became live: what it covers is reachable now."""
        for run in list(holding.runs):
            self._reachability.recheck(run)
            yield

    def retell(self, holding: Holding) -> Iterator[None]:
        """Say the state of all copies in L2 again, run by run; what changes meanwhile is said in order."""
        for run in list(holding.runs):
            if holding.live and run in holding.runs:
                self._announcements.retell(holding, run)
                for told in self.on_copy:
                    told(holding, run, run.held[holding])
            yield

    def _hold(self, holding: Holding, run: Run, first: int, last: int) -> None:
        new = self._tree.hold(holding, run, first, last)
        if new:
            self._came(holding, run, new)

    def _came(self, holding: Holding, run: Run, new: Spans) -> None:
        if holding.live:
            self._reachability.grown(holding, run, new)
        if run.kept:
            self._references.copied(holding.node, run, new)
        if holding.tier is Tier.L2:
            self._announcements.came(holding, run, new)
            for told in self.on_copy:
                told(holding, run, new)

    def _drop(self, holding: Holding, run: Run, first: int, last: int) -> None:
        gone = self._tree.drop(holding, run, first, last)
        if gone:
            if holding.tier is Tier.L2:
                self._announcements.left(holding, run, gone)
            if holding.live:
                absence.note(run, gone, AbsenceReason.EVICTED)
                self._reachability.shrunk(run, gone)
