"""What the pools of the nodes must know of their copies, and the counts per holding that go with it."""

from __future__ import annotations

from functools import reduce
from operator import xor

from services.directory.core import spans as sets
from services.directory.core.effects import ReferencesChanged
from services.directory.core.run import Holding, Run, keys_view
from services.directory.core.spans import Spans

NOTHING: Spans = []


class Announcements:
    """`hosts`: the L2 holdings of a node that counts are kept for; only a live one is spoken of. `waiting`: what is to
    be said, in order. A copy that left needs no word: its pool knows."""

    def __init__(self) -> None:
        self.hosts: dict[str, list[Holding]] = {}
        self.waiting: list[ReferencesChanged] = []

    def came(self, holding: Holding, run: Run, new: Spans) -> None:
        """Blocks came to an L2 holding. Said even where neither bit is set: a word on a former copy of the same block
        may have reached the pool after this one came."""
        if not run.claims and not run.kept and new[-1] <= run.reach and len(new) == 2:
            if holding.live:
                keys = run.keys[new[0] : new[1]].tobytes()
                self.waiting.append(ReferencesChanged(holding.node, False, False, keys))  # noqa: FBT003 - one per event
            return
        holding.referenced += self._state(holding, run, new)
        if new[-1] > run.reach:
            holding.unreachable += sets.size(_beyond(new, run.reach))

    def left(self, holding: Holding, run: Run, gone: Spans) -> None:
        """Blocks left an L2 holding."""
        holding.referenced -= sets.size(sets.both(gone, run.referenced(holding.node)))
        holding.unreachable -= sets.size(_beyond(gone, run.reach))

    def claimed(self, node: str, run: Run, was: Spans) -> None:
        """The claims of `node` on a run changed: they covered `was` before."""
        now = run.referenced(node)
        if now == was:
            return
        if not run.kept and len(was) <= 2 and not (was and was[0]):  # else a claim that was kept has just ended
            old, new = (was[-1] if was else 0), (now[-1] if now else 0)
            gained, lost = ([old, new], NOTHING) if new > old else (NOTHING, [new, old])
        else:
            gained, lost = sets.minus(now, was), sets.minus(was, now)
        for holding in self.hosts.get(node, ()):
            held = run.held.get(holding, NOTHING)
            if gained and (more := sets.both(held, gained)):
                holding.referenced += sets.size(more)
                self._say(holding, run, more, referenced=True)
            if lost and (less := sets.both(held, lost)):
                holding.referenced -= sets.size(less)
                self._say(holding, run, less, referenced=False)

    def reached(self, holding: Holding, run: Run, blocks: Spans, *, lost: bool) -> None:
        """Copies of an L2 holding became reachable, or were lost to reach; `run.reach` says so already."""
        holding.unreachable += sets.size(blocks) if lost else -sets.size(blocks)
        self._state(holding, run, blocks)

    def retell(self, holding: Holding, run: Run) -> None:
        """Say what a pool would not assume of its copies."""
        held = run.held[holding]
        referenced = sets.both(held, run.referenced(holding.node))
        self._say(holding, run, referenced, referenced=True)
        self._say(holding, run, sets.minus(_beyond(held, run.reach), referenced), referenced=False)

    def _state(self, holding: Holding, run: Run, blocks: Spans) -> int:
        """Say both bits of these copies; how many of them are referenced."""
        claimed = run.referenced(holding.node)
        referenced = sets.both(blocks, claimed) if claimed else NOTHING
        if referenced:
            self._say(holding, run, referenced, referenced=True)
            blocks = sets.minus(blocks, referenced)
        self._say(holding, run, blocks, referenced=False)
        return sets.size(referenced)

    def _say(self, holding: Holding, run: Run, blocks: Spans, *, referenced: bool) -> None:
        if not holding.live or not blocks:
            return
        beyond = _beyond(blocks, run.reach)
        within = sets.minus(blocks, beyond) if beyond else blocks
        for part, unreachable in ((within, False), (beyond, True)):
            if part:
                self.waiting.append(ReferencesChanged(holding.node, referenced, unreachable, run.of(part)))

    def check(self) -> None:
        """Assert the counts of every holding."""
        for node, holdings in self.hosts.items():
            for holding in holdings:
                held = [(run, run.held[holding]) for run in holding.runs]
                assert holding.blocks == sum(sets.size(spans) for _, spans in held)
                assert holding.digest == reduce(xor, keys_view(b"".join(run.of(spans) for run, spans in held)), 0)
                counted = sum(sets.size(sets.both(spans, run.referenced(node))) for run, spans in held)
                assert holding.referenced == counted, (node, holding.referenced, counted)
                assert holding.unreachable == sum(sets.size(_beyond(spans, run.reach)) for run, spans in held)


def _beyond(blocks: Spans, reach: int) -> Spans:
    """Those of the blocks from offset `reach` on."""
    if not blocks or blocks[-1] <= reach:
        return NOTHING
    return sets.minus(blocks, [0, reach]) if reach else blocks
