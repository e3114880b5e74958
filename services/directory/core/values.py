"""What copies are worth to the pools that hold them, told where the claimed blocks no longer fit.

Where they fit nothing is told of claimed blocks: then count and time decide. Once they fill most of a node's memory,
its pool learns the worth of each claimed copy: expected returns per second of all branches that claim the block (from
how long each is away, on what kind of wait), times what its depth adds to the cost of computing it again. Copies that
nobody claims any more are told apart everywhere and once, when they are let go.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from schemas.branch import BranchState
from schemas.kv import NodeHello, Tier
from services.directory.core import spans as sets
from services.directory.core.branch import Branch, BranchKey, Claim
from services.directory.core.effects import ValuesChanged
from services.directory.core.lineage import Lineage
from services.directory.core.run import Holding, Run
from services.directory.core.sleepers import Sleepers
from services.directory.core.spans import Spans
from services.directory.core.stretches import Piece, Stretches
from services.directory.core.worth import ENDED, IDLE, LEFT, SHARED, DepthCost

REFIT_S = 60.0
LEFT_KEPT = 10_000
"""Branches of which it is remembered what they left."""


class Values:
    """`hosts`: the L2 holdings of each node, as Announcements keeps them. `now`: the time of the message at hand."""

    def __init__(self, hosts: dict[str, list[Holding]], scarce_share: float, depth_doubling_tokens: int) -> None:
        self.now = 0.0
        self.sleepers = Sleepers()
        self.stretches = Stretches()
        self.scarce: set[str] = set()
        self._hosts = hosts
        self._scarce_share = scarce_share
        self._depth_doubling_tokens = depth_doubling_tokens
        self._block_size = 0
        self._said: list[ValuesChanged] = []
        self._due: list[tuple[float, int, Branch]] = []
        self._order = 0
        self._refit_at: float | None = None
        self._homes: dict[Branch, set[str]] = {}
        self._left: OrderedDict[Branch, list[tuple[Run, int, int]]] = OrderedDict()

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

    def claimed(self, branch: Branch, new: Claim | None) -> None:
        """The claims of a branch went to another context, or ended; a hook of References."""
        before, after = self.stretches.moved(branch, None if new is None else new.tip)
        parent = self.sleepers.follow(branch, new is not None, self.now)
        kept = {stretch.run: stretch.end for stretch in after}
        for stretch in before:
            end = kept.get(stretch.run, 0)
            if end < stretch.end:
                end = max(end, self.stretches.claimed_to(stretch.run))
            if end < stretch.end:
                self._let_go(branch, stretch.run, end, stretch.end, retired=new is None)
        if branch.state is BranchState.ENDED:
            self._end(branch)
        homes = {node for node in (new.prefill, new.decode) if node is not None} if new is not None else set[str]()
        moved = (homes - self._homes.pop(branch, homes)) & self.scarce
        if homes:
            self._homes[branch] = homes
        if self.scarce:
            for run in {stretch.run: None for stretch in [*before, *after]}:
                self._tell(run)
        for stretch in after if moved else ():
            for holding, held in [(h, s) for h, s in stretch.run.held.items() if h.node in moved]:
                self.came(holding, stretch.run, held)
        if parent is not None:
            self._soon(parent, self.now)

    def _let_go(self, branch: Branch, run: Run, first: int, last: int, *, retired: bool) -> None:
        """Nobody claims these blocks now."""
        shared = min(last, max(first, self.stretches.shared_to(run)))
        self._rest(run, first, shared, SHARED)
        if branch.state is BranchState.ENDED:
            self._rest(run, shared, last, ENDED)
            return
        if shared == last:
            return
        self._rest(run, shared, last, IDLE if retired else LEFT)
        self._left.setdefault(branch, []).append((run, shared, last))
        self._left.move_to_end(branch)
        if len(self._left) > LEFT_KEPT:
            self._left.popitem(last=False)

    def _end(self, branch: Branch) -> None:
        """What an ended branch left is worth nothing, unless somebody claims it."""
        for run, first, last in self._left.pop(branch, ()):
            self._rest(run, max(first, self.stretches.claimed_to(run)), min(last, len(run.keys)), ENDED)

    def _rest(self, run: Run, first: int, last: int, value: int) -> None:
        if first < last:
            for holdings in self._hosts.values():
                for holding in holdings:
                    held = run.held.get(holding)
                    if held is not None:
                        self._say(holding, run, sets.both(held, [first, last]), value, referenced=False)

    # what happens to copies and nodes

    def came(self, holding: Holding, run: Run, new: Spans) -> None:
        """Blocks came to an L2 holding, or are to be spoken of again; a hook of Copies."""
        if holding.tier is Tier.L2 and holding.node in self.scarce and run in self.stretches:
            self._say_claimed(holding, run, new, self.stretches.told(run))

    def tick(self, hellos: Iterable[NodeHello]) -> list[Iterator[None]]:
        """Once a second: which nodes are scarce now, with what they said of themselves. Returns jobs."""
        for branch in self.sleepers.expire(self.now):
            self._soon(branch, self.now)
        jobs: list[Iterator[None]] = []
        scarce = {hello.node for hello in hellos if self._is_scarce(hello)}
        jobs += [self._tell_all(node) for node in sorted(scarce - self.scarce)]
        self.scarce = scarce
        if not scarce:
            self._due.clear()
        elif self._refit_at is None or self.now >= self._refit_at:
            self._refit_at = self.now + REFIT_S
            self.sleepers.waits.refit()
            jobs.append(self._evaluate_all())
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
        followed = {branch.key for branch in self.sleepers.branches()}
        assert followed == active, followed ^ active
        assert followed == {branch.key for branch in self.stretches.branches()}
