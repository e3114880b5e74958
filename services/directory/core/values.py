"""What copies are worth to the pools that hold them, told where the claimed blocks no longer fit.

Where they fit nothing is told of claimed blocks: then count and time decide. Once they fill most of a node's memory,
its pool learns the worth of each claimed copy: expected returns per second of all branches that claim the block (from
how long each is away, on what kind of wait), times what its depth adds to the cost of computing it again. Copies that
nobody claims any more are told apart everywhere, by how soon such were claimed again (rests.py): when they are let go,
and when what was learned since says otherwise.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from schemas.branch import BranchState
from schemas.kv import NodeHello, Tier
from services.directory.core import spans as sets
from services.directory.core.branch import Branch, BranchKey, Claim
from services.directory.core.effects import ValuesChanged
from services.directory.core.lineage import Lineage
from services.directory.core.rests import How, Rest, RestKind, Rests
from services.directory.core.run import Holding, Run
from services.directory.core.sleepers import Sleepers
from services.directory.core.spans import Spans
from services.directory.core.stretches import Piece, Stretch, Stretches
from services.directory.core.worth import LARGEST, DepthCost, step_of

REFIT_S = 60.0


class Values:
    """`hosts`: the L2 holdings of each node, as Announcements keeps them. `now`: the time of the message at hand."""

    def __init__(self, hosts: dict[str, list[Holding]], scarce_share: float, depth_doubling_tokens: int) -> None:
        self.now = 0.0
        self.sleepers = Sleepers()
        self.stretches = Stretches()
        self.rests = Rests()
        self.scarce: set[str] = set()
        self._hosts = hosts
        self._scarce_share = scarce_share
        self._depth_doubling_tokens = depth_doubling_tokens
        self._block_size = 0
        self._said: list[ValuesChanged] = []
        self._due: list[tuple[float, int, Branch]] = []
        self._order = 0
        self._refit_at = 0.0
        self._resting: dict[RestKind, int] = {}

    # what happens to branches

    def asked(self, branch: Branch, request: str, lineage: str) -> None:
        """A request of a branch arrived, and what it is to the branch: some read the context that it had."""
        compacts = lineage == Lineage.COMPACT
        if not compacts and lineage != Lineage.EXTENDS:
            return
        if self.sleepers.asked(branch, request, compacts, self.now):
            self._soon(branch, self.now)

    def released(self, request: str) -> None:
        """A request came to nothing."""
        branch = self.sleepers.released(request)
        if branch is not None:
            self._soon(branch, self.now)

    def answered(self, branch: Branch | None, request: str | None, finish: str) -> None:
        """A request was answered; if it became the branch's context, the branch is away from now on."""
        if request is not None:
            self.released(request)
        if branch is not None:
            self.sleepers.answered(branch, finish, self.now)
            self._soon(branch, self.now)

    def claimed(self, branch: Branch, old: Claim | None, new: Claim | None) -> None:
        """The claims of a branch went from one context to another, or ended; a hook of References."""
        parent = self.sleepers.follow(branch, new is not None, self.now)
        self._moved(branch, old, new)
        if branch.state is BranchState.ENDED:
            for rest in self.rests.ended(branch, self.now):
                self._say_resting(rest)
        if parent is not None:
            self._soon(parent, self.now)

    def attached(self, orphan: Run) -> None:
        """A chain is known to its start: whoever claims its end claims all of it; a hook of the tree."""
        for branch in self.stretches.passing(orphan):
            self._moved(branch, branch.claim, branch.claim)

    def _moved(self, branch: Branch, old: Claim | None, new: Claim | None) -> None:
        before, after = self.stretches.moved(branch, None if new is None else new.tip)
        kept = {stretch.run: stretch.end for stretch in after}
        for run, end in kept.items():
            self.rests.claimed(run, end, self.now)
        for stretch in before:
            end = kept.get(stretch.run, 0)
            if end < stretch.end:
                end = max(end, self.stretches.claimed_to(stretch.run))
            if end < stretch.end:
                self._let_go(branch, stretch.run, end, stretch.end, retired=new is None)
        if self.scarce:
            for run in {stretch.run: None for stretch in [*before, *after]}:
                self._tell(run)
            self._tell_homes({stretch.run: stretch.end for stretch in before}, after, _homes(old), _homes(new))

    def _tell_homes(self, was: dict[Run, int], after: list[Stretch], former: set[str], homes: set[str]) -> None:
        """Say all of the copies that a branch claims now where it did not, whether their worth changed or not."""
        for node in homes & self.scarce:
            for run, end in after:
                first = was.get(run, 0) if node in former else 0
                for holding in self._hosts[node] if first < end else ():
                    self.came(holding, run, sets.both(run.held.get(holding, []), [first, end]))

    def _let_go(self, branch: Branch, run: Run, first: int, last: int, *, retired: bool) -> None:
        """Nobody claims these blocks now."""
        how = How.ENDED if branch.state is BranchState.ENDED else How.IDLE if retired else How.LEFT
        start, passed = self.stretches.start_of(run), self.stretches.passed_by_others(run, branch)
        for rest in self.rests.let_go(branch, run, first, last, start, passed, how, self.now):
            self._say_resting(rest)

    def _say_resting(self, rest: Rest) -> None:
        value = self._resting.get(rest.kind)
        if value is None:
            value = self._resting[rest.kind] = self._resting_value(rest.kind)
        for holding, held in list(rest.run.held.items()):
            if holding.tier is Tier.L2:
                self._say(holding, rest.run, sets.both(held, [rest.first, rest.last]), value, referenced=False)

    def _resting_value(self, kind: RestKind) -> int:
        return min(LARGEST, step_of(self.rests.rate(kind)) + self.stretches.depth_cost.steps(kind.depth))

    def _revalue_resting(self) -> Iterator[None]:
        """Learn how soon what nobody claims is claimed again, and say what that changes, run by run."""
        self.rests.refit(self.now)
        was, self._resting = self._resting, {kind: self._resting_value(kind) for kind in self.rests.kinds()}
        changed = {kind for kind, value in self._resting.items() if was.get(kind) != value}
        for stack in self.rests.runs() if changed else ():
            for rest in stack:
                if rest.kind in changed:
                    self._say_resting(rest)
            yield

    # what happens to copies and nodes

    def came(self, holding: Holding, run: Run, new: Spans) -> None:
        """Blocks came to an L2 holding, or are to be spoken of again; a hook of Copies."""
        if holding.tier is Tier.L2 and holding.node in self.scarce and run in self.stretches:
            if self.stretches.is_stale(run):
                self._tell(run)
            self._say_claimed(holding, run, new, self.stretches.told(run))

    def tick(self, hellos: Iterable[NodeHello]) -> list[Iterator[None]]:
        """Once a second: which nodes are scarce now, with what they said of themselves. Returns jobs."""
        for branch in self.sleepers.expire(self.now):
            self._soon(branch, self.now)
        self.rests.tick(self.now)
        jobs: list[Iterator[None]] = []
        scarce = {hello.node for hello in hellos if self._is_scarce(hello)}
        jobs += [self._tell_all(node) for node in sorted(scarce - self.scarce)]
        self.scarce = scarce
        if not scarce:
            self._due.clear()
        if self.now >= self._refit_at:
            self._refit_at = self.now + REFIT_S
            self.sleepers.waits.refit()
            jobs += [self._evaluate_all()] if scarce else []
            jobs.append(self._revalue_resting())
        return jobs

    @property
    def due(self) -> bool:
        """Whether there is a branch to bring up to date."""
        return bool(self._due) and self._due[0][0] <= self.now

    def step(self) -> bool:
        """Bring one branch up to date that is due; whether there was one."""
        if self.due:
            self._evaluate(heapq.heappop(self._due)[2])
            return True
        return False

    def take(self) -> list[ValuesChanged]:
        """What is to be said now."""
        said = self._said
        if said:
            self._said = []
        return said

    def _is_scarce(self, hello: NodeHello) -> bool:
        if hello.block_size != self._block_size:
            self._block_size = hello.block_size
            self.stretches.depth_cost = DepthCost(self._depth_doubling_tokens / hello.block_size)
        referenced = sum(holding.referenced for holding in self._hosts.get(hello.node, ()) if holding.live)
        return referenced * hello.block_size >= self._scarce_share * hello.capacities.l2_tokens > 0

    def _tell_all(self, node: str) -> Iterator[None]:
        """A node became scarce: tell it everything, run by run."""
        yield from self._evaluate_all()
        for holding in self._hosts.get(node, ()):
            for run in list(holding.runs) if holding.live else ():
                if run in holding.runs:
                    self._tell(run)
                    self.came(holding, run, run.held[holding])
                    yield

    def _evaluate_all(self) -> Iterator[None]:
        for branch in self.sleepers.branches():
            self._evaluate(branch)
            yield

    def _soon(self, branch: Branch, due: float) -> None:
        """Bring up to date at `due` what the branch adds to the worth of its blocks."""
        if self.scarce:
            self._order += 1
            heapq.heappush(self._due, (due, self._order, branch))

    def _evaluate(self, branch: Branch) -> None:
        sleeper = self.sleepers.get(branch)
        if sleeper is None:
            return
        step, due = self.sleepers.step(sleeper, self.now)
        if due is not None and due != sleeper.due:
            self._soon(branch, due)
        sleeper.due = due
        if step != sleeper.step:
            sleeper.step = step
            self.stretches.weigh(branch, step)
            for stretch in self.stretches.of(branch):
                self._tell(stretch.run)

    def _tell(self, run: Run) -> None:
        """Say what changed in the worth of the claimed blocks of a run."""
        changed = self.stretches.revalue(run)
        if changed:
            for node in self.scarce:
                for holding in self._hosts[node]:
                    held = run.held.get(holding)
                    if held is not None:
                        self._say_claimed(holding, run, held, changed)

    def _say_claimed(self, holding: Holding, run: Run, blocks: Spans, worth: list[Piece]) -> None:
        referenced = sets.both(blocks, run.referenced(holding.node))
        for piece in worth:
            self._say(holding, run, sets.both(referenced, [piece.first, piece.last]), piece.value, referenced=True)

    def _say(self, holding: Holding, run: Run, blocks: Spans, value: int, *, referenced: bool) -> None:
        if blocks and holding.live:
            self._said.append(ValuesChanged(holding.node, value, referenced, run.of(blocks)))

    def check(self, active: set[BranchKey]) -> None:
        """Assert that exactly the claiming branches are followed, and the parts' own invariants."""
        self.sleepers.check()
        self.stretches.check()
        self.rests.check()
        followed = {branch.key for branch in self.sleepers.branches()}
        assert followed == active, followed ^ active
        assert followed == {branch.key for branch in self.stretches.branches()}


def _homes(claim: Claim | None) -> set[str]:
    """The nodes that a claim lies on."""
    return {node for node in (claim.prefill, claim.decode) if node is not None} if claim is not None else set()
