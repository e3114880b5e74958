"""Branches between an answer and their next request: since when, on what kind of wait, and when they came back."""

from __future__ import annotations

from collections import OrderedDict
from math import log2

from services.directory.core.branch import Branch, BranchKey
from services.directory.core.waits import BINS, EDGES_S, WaitKind, Waits, bin_of
from services.directory.core.worth import AWAKE, LEAST, step_of

REQUEST_LEASE_S = 600.0
"""A request that is neither answered nor released is taken for gone after this time."""
SLOWEST = 12


class Sleeper:
    """One branch that claims blocks. `requests`: how many that read its context are under way; `leaving`: one of them
    is a compaction, after which most of it is of no use. `step`: what the branch adds to the worth of its blocks, as
    told; it changes at `due` if nothing happens. `pace`: usual log2 of its waits in seconds."""

    __slots__ = ("children", "due", "finish", "kind", "leaving", "pace", "parent", "requests", "since", "step")

    def __init__(self, since: float, parent: BranchKey | None) -> None:
        self.since = since
        self.parent = parent
        self.finish = ""
        self.children = 0
        self.pace: float | None = None
        self.requests = 0
        self.leaving = False
        self.step = AWAKE
        self.due: float | None = None
        self.kind = self._kind()

    def begin(self, now: float) -> None:
        """A wait begins, or becomes one of another kind."""
        self.since, self.kind = now, self._kind()

    def _kind(self) -> WaitKind:
        pace = -1 if self.pace is None else max(0, min(SLOWEST, round(self.pace)))
        return WaitKind(self.finish, self.children > 0, pace)


class Sleepers:
    """All branches that claim blocks, and the requests under way of which an answer or a release is still to come."""

    def __init__(self) -> None:
        self.waits = Waits()
        self._followed: dict[BranchKey, tuple[Branch, Sleeper]] = {}
        self._requests: OrderedDict[str, tuple[BranchKey, float]] = OrderedDict()

    def branches(self) -> list[Branch]:
        return [branch for branch, _ in self._followed.values()]

    def get(self, branch: Branch) -> Sleeper | None:
        found = self._followed.get(branch.key)
        return None if found is None else found[1]

    def follow(self, branch: Branch, claims: bool, now: float) -> Branch | None:
        """A branch begins or ends to claim blocks; the branch that opened it if that one's wait is another one now."""
        sleeper = self.get(branch)
        if sleeper is not None and claims:
            sleeper.leaving = False
            sleeper.begin(branch.seen)
        if claims == (sleeper is not None):
            return None
        if sleeper is None:
            self._followed[branch.key] = (branch, Sleeper(branch.seen, branch.parent))
            return self._bear(branch.parent, 1, now)
        del self._followed[branch.key]
        self._lose(sleeper, now)
        return self._bear(sleeper.parent, -1, now)

    def asked(self, branch: Branch, request: str, compacts: bool, now: float) -> bool:
        """A request that reads its branch's context arrived; whether the branch is followed and this is news."""
        sleeper = self.get(branch)
        if sleeper is None or request in self._requests:
            return False
        sleeper.leaving = compacts
        if not sleeper.requests:
            waited_s = now - sleeper.since
            self.waits.returned(sleeper.kind, waited_s)
            octave = log2(max(waited_s, 1e-3))
            sleeper.pace = octave if sleeper.pace is None else (sleeper.pace + octave) / 2.0
        sleeper.requests += 1
        self._requests[request] = (branch.key, now + REQUEST_LEASE_S)
        return True

    def released(self, request: str) -> Branch | None:
        """A request is over; its branch if it is followed."""
        key, _ = self._requests.pop(request, (None, 0.0))
        found = self._followed.get(key) if key is not None else None
        if found is None:
            return None
        found[1].requests = max(0, found[1].requests - 1)
        return found[0]

    def answered(self, branch: Branch, finish: str, now: float) -> None:
        """The branch has an answer, which ended in this way. Its wait began if it claimed a new context just now."""
        sleeper = self.get(branch)
        if sleeper is not None and sleeper.since == now:
            sleeper.finish = finish
            sleeper.begin(now)

    def expire(self, now: float) -> list[Branch]:
        """Forget requests of which nothing was heard; the branches they belonged to."""
        expired: list[Branch] = []
        while self._requests and next(iter(self._requests.values()))[1] <= now:
            branch = self.released(next(iter(self._requests)))
            if branch is not None:
                expired.append(branch)
        return expired

    def step(self, sleeper: Sleeper, now: float) -> tuple[int, float | None]:
        """What the branch adds to the worth of its blocks now, and when time alone changes that."""
        if sleeper.requests:
            return (LEAST if sleeper.leaving else AWAKE), None
        rates = self.waits.rates(sleeper.kind)
        at = bin_of(now - sleeper.since)
        step = step_of(rates[at])
        for later in range(at + 1, BINS):
            if step_of(rates[later]) != step:
                return step, sleeper.since + EDGES_S[later]
        return step, None

    def _bear(self, parent: BranchKey | None, change: int, now: float) -> Branch | None:
        found = self._followed.get(parent) if parent is not None else None
        if found is None:
            return None
        branch, sleeper = found
        had, sleeper.children = sleeper.children > 0, max(0, sleeper.children + change)
        if had == (sleeper.children > 0):
            return None
        self._lose(sleeper, now)
        if not sleeper.requests:
            sleeper.begin(now)
        return branch

    def _lose(self, sleeper: Sleeper, now: float) -> None:
        """A wait ends, or goes on as one of another kind, without a return."""
        if not sleeper.requests and now > sleeper.since:
            self.waits.lost(sleeper.kind, now - sleeper.since)

    def check(self) -> None:
        self.waits.check()
        counts: dict[BranchKey, int] = {}
        for key, _ in self._requests.values():
            counts[key] = counts.get(key, 0) + 1
        for key, (branch, sleeper) in self._followed.items():
            assert branch.key == key
            assert 0 <= sleeper.requests <= counts.get(key, 0)
