"""Which branches pass which run of the tree, and what that makes each block of it worth."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from services.directory.core.branch import Branch, BranchKey
from services.directory.core.run import Run, Tip, path
from services.directory.core.worth import AWAKE, LARGEST, DepthCost, rate_of, step_of

PURGE_AT = 1024
PAST = 16
"""Branches remembered of a run that they left."""


class Stretch(NamedTuple):
    """Blocks [0, end) of a run belong to a context."""

    run: Run
    end: int


class Piece(NamedTuple):
    """Blocks [first, last) of a run are worth `value`."""

    first: int
    last: int
    value: int


class _Passed:
    """One run: `ends` by branch that passes it now, `pieces` as told, `stale` if these changed since. `start`: blocks
    of a context before the run. `past`: how far branches had come on it that left it, those of the furthest."""

    __slots__ = ("ends", "past", "pieces", "stale", "start")

    def __init__(self) -> None:
        self.start = 0
        self.stale = True
        self.ends: dict[Branch, int] = {}
        self.past: dict[BranchKey, int] = {}
        self.pieces: list[Piece] = []

    def leave(self, branch: Branch) -> None:
        """The branch passes it no more."""
        self.stale = True
        self.past[branch.key] = max(self.ends.pop(branch), self.past.get(branch.key, 0))
        if len(self.past) > PAST:
            del self.past[min(self.past, key=self.past.__getitem__)]


class Stretches:
    """The contexts of all claiming branches by run, each with the step its branch adds."""

    def __init__(self) -> None:
        self.depth_cost = DepthCost(float("inf"))
        self._runs: dict[Run, _Passed] = {}
        self._paths: dict[Branch, list[Stretch]] = {}
        self._steps: dict[Branch, int] = {}
        self._purge_at = PURGE_AT

    def __contains__(self, run: Run) -> bool:
        return run in self._runs

    def branches(self) -> list[Branch]:
        return list(self._paths)

    def of(self, branch: Branch) -> list[Stretch]:
        """The context of a branch, its end first."""
        return self._paths.get(branch, [])

    def passing(self, run: Run) -> list[Branch]:
        """The branches whose context is known to pass the run."""
        passed = self._runs.get(run)
        return list(passed.ends) if passed is not None else []

    def is_stale(self, run: Run) -> bool:
        """Whether claims on the run changed since its worth was brought up to date, as it is while a node is scarce."""
        return self._runs[run].stale

    def told(self, run: Run) -> list[Piece]:
        """What was said last of the claimed blocks of a run."""
        return self._runs[run].pieces

    def claimed_to(self, run: Run) -> int:
        """Blocks [0, n) of the run that a branch claims."""
        passed = self._runs.get(run)
        return max(passed.ends.values(), default=0) if passed is not None else 0

    def start_of(self, run: Run) -> int:
        """Blocks of a context before the run."""
        passed = self._runs.get(run)
        return passed.start if passed is not None else 0

    def passed_by_others(self, run: Run, branch: Branch) -> list[int]:
        """How far other branches had come on the run that left it, at most PAST of them."""
        passed = self._runs.get(run)
        return [end for key, end in passed.past.items() if key != branch.key] if passed is not None else []

    def weigh(self, branch: Branch, step: int) -> None:
        """What the branch adds from now on; `revalue` says what that changes."""
        self._steps[branch] = step

    def moved(self, branch: Branch, tip: Tip | None) -> tuple[list[Stretch], list[Stretch]]:
        """The branch has another context, or none; both, the old one first."""
        before = self._paths.pop(branch, [])
        after = [Stretch(run, end) for run, end in path(tip)] if tip is not None else []
        passing = {stretch.run for stretch in after}
        for stretch in before:
            if stretch.run not in passing:
                self._runs[stretch.run].leave(branch)
        depth = sum(stretch.end for stretch in after)
        for run, end in after:
            passed = self._runs.get(run)
            if passed is None:
                passed = self._runs[run] = _Passed()
            depth -= end
            passed.start, passed.stale = depth, True
            passed.ends[branch] = end
        if after:
            self._paths[branch] = after
            self._steps.setdefault(branch, AWAKE)
        else:
            self._steps.pop(branch, None)
        self._purge()
        return before, after

    def revalue(self, run: Run) -> list[Piece]:
        """Bring the worth of the claimed blocks of a run up to date; what has to be said of them."""
        passed = self._runs.get(run)
        if passed is None:
            return []
        passed.stale = False
        pieces = self._pieces(passed)
        changed = list(_changes(passed.pieces, pieces))
        passed.pieces = pieces
        return changed

    def _pieces(self, passed: _Passed) -> list[Piece]:
        """The worth of every claimed block, from the deepest end upwards: shallower blocks have more claims, and all
        that an awake branch claims are worth the most."""
        steps = self._steps
        awake = max([end for branch, end in passed.ends.items() if steps[branch] == AWAKE], default=0)
        by_end = sorted([(end, steps[branch]) for branch, end in passed.ends.items() if end > awake], reverse=True)
        pieces: list[Piece] = []
        rate = 0.0
        for number, (end, step) in enumerate(by_end):
            rate += rate_of(step)
            first = by_end[number + 1][0] if number + 1 < len(by_end) else awake
            if first == end:
                continue
            base, start = step_of(rate), passed.start
            parts: list[Piece] = []
            for last, more in self.depth_cost.pieces(start + first, start + end):
                at = parts[-1].last if parts else first
                parts.append(Piece(at, last - start, min(LARGEST, base + more)))
            pieces += reversed(parts)
        if awake:
            pieces.append(Piece(0, awake, AWAKE))
        return pieces[::-1]

    def _purge(self) -> None:
        """Runs that the tree forgot, and that no branch passes, are forgotten here too."""
        if len(self._runs) > self._purge_at:
            gone = [run for run, passed in self._runs.items() if not passed.ends and not run.keys]
            for run in gone:
                del self._runs[run]
            self._purge_at = 2 * len(self._runs) + PURGE_AT

    def check(self) -> None:
        assert all(way == [Stretch(*at) for at in path((way[0].run, way[0].end))] for way in self._paths.values())
        expected = {(stretch.run, branch): stretch.end for branch, way in self._paths.items() for stretch in way}
        assert expected == {(run, b): end for run, passed in self._runs.items() for b, end in passed.ends.items()}
        assert self._steps.keys() == self._paths.keys()
        for run, passed in self._runs.items():
            pieces = self._pieces(passed)
            assert sum(piece.last - piece.first for piece in pieces) == self.claimed_to(run), pieces
            assert all(left.last == right.first for left, right in pairwise(pieces)), pieces


def _changes(old: list[Piece], new: list[Piece]) -> list[Piece]:
    """Those parts of `new` whose value `old` does not give."""
    changed: list[Piece] = []
    number = 0
    for piece in new:
        at = piece.first
        while at < piece.last:
            while number < len(old) and old[number].last <= at:
                number += 1
            known = old[number] if number < len(old) else None
            same = known is not None and known.first <= at
            until = piece.last if known is None else min(piece.last, known.last if same else known.first)
            if not same or known is None or known.value != piece.value:
                if changed and changed[-1].last == at and changed[-1].value == piece.value:
                    changed[-1] = Piece(changed[-1].first, until, piece.value)
                else:
                    changed.append(Piece(at, until, piece.value))
            at = until
    return changed
