"""Blocks that no branch claims any more: how they were let go, and how soon such blocks are claimed again.

Claims cover prefixes of runs, so what rests on a run is a stack of pieces behind its claimed part, the newest last. A
kind of piece has a rate, learned from all of its pieces: how many were claimed again, over the time they were watched.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from enum import StrEnum
from itertools import pairwise
from math import isqrt
from typing import NamedTuple

from services.directory.core.branch import Branch
from services.directory.core.run import Run

WATCHED_S = 600.0
"""A piece is watched so long after it was let go; what happens to it later teaches nothing."""
LEAN = 20.0
"""A kind counts with so many pieces of which nothing but the rate of all kinds is known."""
REMEMBERED = 4096.0
"""Pieces of one kind that were watched to the end; beyond that older ones count half."""
LEFT_KEPT = 10_000
"""Branches of which it is remembered what they left."""
PURGE_AT = 1024


class How(StrEnum):
    """What the branch did that let a piece go last: it ended, went on with another context, or was silent for long."""

    ENDED = "ended"
    LEFT = "left"
    IDLE = "idle"


class RestKind(NamedTuple):
    """How a piece was let go, the octave of how many other branches had passed it, and the half octave of its place."""

    how: How
    others: int
    place: int

    @property
    def depth(self) -> int:
        """The least number of blocks before such a piece."""
        return _least(self.place)


class Rest:
    """Blocks [first, last) of a run, of `size` when they were let go at `since`."""

    __slots__ = ("first", "kind", "last", "run", "since", "size", "watched")

    def __init__(self, run: Run, first: int, last: int, kind: RestKind, since: float) -> None:
        self.run, self.first, self.last, self.kind, self.since = run, first, last, kind, since
        self.size = last - first
        self.watched = False


class _Tally:
    """Pieces of one kind: those watched now, and of all others how many came back and the seconds they were watched."""

    __slots__ = ("begun", "returned", "seconds", "watched")

    def __init__(self) -> None:
        self.watched = self.begun = self.returned = self.seconds = 0.0

    def open(self, share: float, since: float) -> None:
        self.watched += share
        self.begun += share * since

    def close(self, share: float, since: float, now: float) -> None:
        self.watched -= share
        self.begun -= share * since
        self.seconds += share * (now - since)
        if self.seconds > REMEMBERED * WATCHED_S:
            self.seconds *= 0.5
            self.returned *= 0.5

    def seconds_at(self, now: float) -> float:
        return self.seconds + self.watched * now - self.begun


class Rests:
    """All resting pieces, and per kind the rate at which such are claimed again."""

    def __init__(self) -> None:
        self._stacks: dict[Run, list[Rest]] = {}
        self._watched: deque[tuple[float, Rest]] = deque()
        self._left: OrderedDict[Branch, list[Rest]] = OrderedDict()
        self._tallies: dict[RestKind, _Tally] = {}
        self._rates: dict[RestKind, float] = {}
        self._usual = 1.0 / WATCHED_S
        self._purge_at = PURGE_AT

    def rate(self, kind: RestKind) -> float:
        """Claims per second, as of the last `refit`. Of a kind not seen yet: what several branches passed is passed
        more often in proportion."""
        return self._rates.get(kind) or self._prior(kind)

    def let_go(
        self, branch: Branch, run: Run, first: int, last: int, start: int, passed: list[int], how: How, now: float
    ) -> list[Rest]:
        """Nobody claims these blocks now; the pieces they make, by kind. `start`: blocks of the context before the run;
        `passed`: how far each other branch had come on it."""
        ends = sorted({first, last, *_places(first, last, start), *(end for end in passed if first < end < last)})
        rests: list[Rest] = []
        for begin, end in pairwise(ends):
            others = sum(reached > begin for reached in passed)
            kind = RestKind(how, others.bit_length(), _place(start + begin))
            rests.append(Rest(run, begin, end, kind, now))
        for rest in rests:
            self._watch(rest)
        self._stacks.setdefault(run, []).extend(reversed(rests))
        if how is not How.ENDED:
            self._left.setdefault(branch, []).extend(rests)
            self._left.move_to_end(branch)
            if len(self._left) > LEFT_KEPT:
                self._left.popitem(last=False)
        return rests

    def claimed(self, run: Run, end: int, now: float) -> None:
        """A branch claims [0, end) of a run."""
        stack = self._stacks.get(run)
        if stack is None:
            return
        while stack and stack[-1].first < end:
            rest = stack[-1]
            until = min(rest.last, end)
            if rest.watched:
                share = (until - rest.first) / rest.size
                tally = self._tallies[rest.kind]
                tally.returned += share
                tally.close(share, rest.since, now)
            rest.first = until
            if until == rest.last:
                rest.watched = False
                stack.pop()
        if not stack:
            del self._stacks[run]

    def ended(self, branch: Branch, now: float) -> list[Rest]:
        """A branch ended; what it had left before and still rests."""
        rests = [rest for rest in self._left.pop(branch, ()) if rest.first < rest.last]
        for rest in rests:
            self._unwatch(rest, now)
            rest.kind, rest.since, rest.size = rest.kind._replace(how=How.ENDED), now, rest.last - rest.first
            self._watch(rest)
        return rests

    def tick(self, now: float) -> None:
        """Pieces watched for long enough are watched no more; runs that the tree forgot are forgotten here too."""
        while self._watched and self._watched[0][0] + WATCHED_S <= now:
            since, rest = self._watched.popleft()
            if rest.since == since:
                self._unwatch(rest, since + WATCHED_S)
        if len(self._stacks) > self._purge_at:
            for run in [run for run in self._stacks if not run.keys]:
                for rest in self._stacks.pop(run):
                    self._unwatch(rest, now)
            self._purge_at = 2 * len(self._stacks) + PURGE_AT

    def refit(self, now: float) -> None:
        """Take in what was counted."""
        seconds = {kind: tally.seconds_at(now) for kind, tally in self._tallies.items()}
        returned = sum(tally.returned for tally in self._tallies.values())
        self._usual = (returned + 1.0) / (sum(seconds.values()) + WATCHED_S)
        for kind, tally in self._tallies.items():
            expected = self._prior(kind) * LEAN * WATCHED_S
            self._rates[kind] = (tally.returned + expected) / (seconds[kind] + LEAN * WATCHED_S)

    def kinds(self) -> list[RestKind]:
        """All kinds seen."""
        return list(self._tallies)

    def runs(self) -> Iterator[list[Rest]]:
        """What rests on each run."""
        for run in list(self._stacks):
            yield self._stacks.get(run, [])

    def _prior(self, kind: RestKind) -> float:
        return self._usual * 2.0**kind.others

    def _watch(self, rest: Rest) -> None:
        rest.watched = True
        self._tallies.setdefault(rest.kind, _Tally()).open(1.0, rest.since)
        self._watched.append((rest.since, rest))

    def _unwatch(self, rest: Rest, now: float) -> None:
        if rest.watched:
            rest.watched = False
            self._tallies[rest.kind].close((rest.last - rest.first) / rest.size, rest.since, now)

    def check(self) -> None:
        """Assert that pieces of a run follow each other, and that exactly the watched ones are counted as such."""
        watched = dict.fromkeys(self._tallies, 0.0)
        for run, stack in self._stacks.items():
            assert stack, run
            assert all(rest.first < rest.last for rest in stack)
            assert all(later.last <= earlier.first for earlier, later in pairwise(stack)), stack
            for rest in stack:
                if rest.watched:
                    watched[rest.kind] += (rest.last - rest.first) / rest.size
        for kind, share in watched.items():
            assert abs(self._tallies[kind].watched - share) < 1e-6, kind


def _place(depth: int) -> int:
    """Half octave of the number of a block in its context, counted from 1."""
    return ((depth + 1) ** 2).bit_length() - 1


def _least(place: int) -> int:
    """The least depth of a place."""
    return isqrt((1 << place) - 1)


def _places(first: int, last: int, start: int) -> Iterator[int]:
    """Where within [first, last) of a run that begins at depth `start` another place begins."""
    place = _place(start + first) + 1
    while (begin := _least(place) - start) < last:
        yield begin
        place += 1
