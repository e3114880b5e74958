"""Reference counts: which copies active branches claim, by phase.

A claim is (branch, block, phase) and lies on one node: the one that served the branch's latest request in that phase.
The count of a copy is the number of claims on its block at its node; without a copy there is nothing to count, and the
claim counts again when a copy is made again. So claims change with branches and nodes change with copies, apart.

Contexts are paths from the root, so on each run a claim covers a prefix and a count is a multiset of prefix lengths.
The one exception is `kept`: when a node goes from decode to prefill its decode claims end, but a block whose only copy
lies there stays claimed, now as a prefill claim on that node, until the branch's prefill node reports a copy or its
next request ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from schemas.phase import Phase
from services.directory.core import spans as sets
from services.directory.core.announcements import Announcements
from services.directory.core.branch import Branch, Claim
from services.directory.core.prefix_tree import PrefixTree
from services.directory.core.run import Ends, Run, Tip, path
from services.directory.core.spans import Spans

Before = dict[tuple[Run, str], Spans]
"""What was referenced on a run at a node before a change."""


class References:
    """All claims of all branches. What they mean for copies is said through `announcements`. Each of `on_claim` is
    called with every branch whose context changed, its old claim and its new one, once all is booked."""

    def __init__(self, tree: PrefixTree, announcements: Announcements) -> None:
        self.tree = tree
        self._announcements = announcements
        self._journal = tree.journal
        tree.on_attach.append(self._attached)
        self.on_claim: list[Callable[[Branch, Claim | None, Claim | None], None]] = []
        self.claimed_blocks = 0
        self._decoding: dict[str, dict[Branch, None]] = {}
        self._switching: dict[Branch, str] = {}
        self.leaving: dict[Branch, None] = {}
        """Branches that claim nothing any more; `step` takes their claims away."""

    def claim(self, branch: Branch, new: Claim | None, blocks: int) -> None:
        """`branch` claims exactly the `blocks` blocks of `new` from now on; None ends all its claims."""
        self.settle(branch)
        self._journal.changed(branch)
        before: Before = {}
        old = branch.claim
        self.claimed_blocks += _weight(new, blocks) - _weight(old, branch.blocks)
        for phase in (Phase.PREFILL, Phase.DECODE):
            self._move(phase, _home(old, phase), old, _home(new, phase), new, before)
        for run in list(branch.kept):
            for owner, node in [place for place in run.kept if place[0] is branch]:
                self._touch(before, run, node)
                self._unkeep(run, owner, node)
        self._book(branch, old, new)
        branch.claim, branch.blocks = new, blocks
        self._report(before)
        for told in self.on_claim:
            told(branch, old, new)

    def leave(self, branch: Branch) -> None:
        """`branch` claims nothing from now on; `step` does the work, or `settle` once its claim is asked about."""
        self.leaving[branch] = None

    def step(self) -> bool:
        """Take away the claims of one branch that left; whether there was one."""
        branch = next(iter(self.leaving), None)
        if branch is not None:
            self.settle(branch)
        return branch is not None

    def copied(self, node: str, run: Run, new: Spans) -> None:
        """`node` reports copies: a claim that was kept elsewhere for want of them comes home."""
        before: Before = {}
        for branch, place in list(run.kept):
            if branch.claim is not None and branch.claim.prefill == node:
                self._touch(before, run, place)
                self._trim(run, branch, place, new)
                self._journal.changed(branch)
        self._report(before)

    def switch(self, node: str) -> Iterator[None]:
        """`node` goes from decode to prefill, as of this call; iterating does the work, one branch at a time."""
        waiting = list(self._decoding.get(node, ()))
        self._switching |= dict.fromkeys(waiting, node)

        def one_by_one() -> Iterator[None]:
            for branch in waiting:
                self.settle(branch)
                yield

        return one_by_one()

    def settle(self, branch: Branch) -> None:
        """To be called before the claim of `branch` is read. If it left, its claims end. If its decode node went to
        prefill, the decode claims there end, and on blocks whose only copy lies there they become prefill claims."""
        if branch in self.leaving:
            del self.leaving[branch]
            self.claim(branch, None, branch.blocks)
        node = self._switching.pop(branch, None)
        claim = branch.claim
        if node is None or claim is None:
            return
        before: Before = {}
        for run, end in path(claim.tip):
            self._touch(before, run, node)
            self._remove(run, node, Phase.DECODE, end)
            if claim.prefill != node:
                self._keep(run, branch, node, sets.both(self._sole(run, node), [0, end]), before)
        new = claim._replace(decode=None)
        self.claimed_blocks += _weight(new, branch.blocks) - _weight(claim, branch.blocks)
        self._book(branch, claim, new)
        branch.claim = new
        self._journal.changed(branch)
        self._report(before)

    def restore_kept(self, branch: Branch, run: Run, node: str, blocks: Spans) -> None:
        """Put back a kept claim out of a checkpoint."""
        before: Before = {}
        self._touch(before, run, node)
        self._keep(run, branch, node, blocks, before)
        self._report(before)

    def claims(self, run: Run, offset: int, node: str) -> dict[Phase, int]:
        """How many claims of each phase lie on a block at `node`, copies or not."""
        found = {
            phase: ends.over(offset) if (ends := run.claims.get((node, phase))) else 0
            for phase in (Phase.PREFILL, Phase.DECODE)
        }
        found[Phase.PREFILL] += sum(
            place == node and sets.reach(kept, offset) > offset for (_, place), kept in run.kept.items()
        )
        return found

    def _move(
        self,
        phase: Phase,
        home: str | None,
        old: Claim | None,
        new_home: str | None,
        new: Claim | None,
        before: Before,
    ) -> None:
        """Move a branch's claims of one phase from (home, old context) to (new_home, new context)."""
        if home is not None and home == new_home and old is not None and new is not None:
            run = old.tip[0]
            if run is new.tip[0]:
                if old.tip[1] != new.tip[1]:
                    self._touch(before, run, home)
                    run.claims[home, phase].move(old.tip[1], new.tip[1])
                return
        was = dict(path(old.tip)) if old is not None and home is not None else {}
        now = dict(path(new.tip)) if new is not None and new_home is not None else {}
        for run, end in was.items():
            if home is not None and (home != new_home or now.get(run) != end):
                self._touch(before, run, home)
                self._remove(run, home, phase, end)
        for run, end in now.items():
            if new_home is not None and (home != new_home or was.get(run) != end):
                self._touch(before, run, new_home)
                run.claims.setdefault((new_home, phase), Ends()).add(end)

    def _book(self, branch: Branch, old: Claim | None, new: Claim | None) -> None:
        if old is not None:
            old.tip[0].tips.pop(branch, None)
            if old.decode is not None:
                self._decoding[old.decode].pop(branch)
        if new is not None:
            new.tip[0].tips[branch] = None
            if new.decode is not None:
                self._decoding.setdefault(new.decode, {})[branch] = None

    def _remove(self, run: Run, node: str, phase: Phase, end: int) -> None:
        ends = run.claims[node, phase]
        ends.remove(end)
        if not ends.counts:
            del run.claims[node, phase]

    def _sole(self, run: Run, node: str) -> Spans:
        """Blocks of `run` that lie on `node` and on no other node."""
        own: Spans = []
        others: Spans = []
        for holding, held in run.held.items():
            if holding.live:
                target = own if holding.node == node else others
                for i in range(0, len(held), 2):
                    sets.add(target, held[i], held[i + 1])
        return sets.minus(own, others)

    def _keep(self, run: Run, branch: Branch, node: str, blocks: Spans, before: Before) -> None:
        if not blocks:
            return
        for owner, place in list(run.kept):
            if owner is branch and place != node:
                self._touch(before, run, place)
                self._trim(run, branch, place, blocks)
        kept = run.kept.setdefault((branch, node), [])
        for i in range(0, len(blocks), 2):
            sets.add(kept, blocks[i], blocks[i + 1])
        branch.kept.add(run)

    def _trim(self, run: Run, branch: Branch, node: str, blocks: Spans) -> None:
        run.kept[branch, node] = left = sets.minus(run.kept[branch, node], blocks)
        if not left:
            self._unkeep(run, branch, node)

    def _unkeep(self, run: Run, branch: Branch, node: str) -> None:
        del run.kept[branch, node]
        if not any(owner is branch for owner, _ in run.kept):
            branch.kept.discard(run)

    def _attached(self, orphan: Run) -> None:
        """An orphan found its parent: the claims that pass it pass all runs above it as well."""
        before: Before = {}
        if orphan.parent is not None:
            above: Tip = (orphan.parent, orphan.offset)
            for (node, phase), ends in orphan.claims.items():
                for run, end in path(above):
                    self._touch(before, run, node)
                    run.claims.setdefault((node, phase), Ends()).add(end, ends.total())
        self._report(before)

    def _touch(self, before: Before, run: Run, node: str) -> None:
        """Note what was referenced before the first change of (run, node)."""
        if (run, node) not in before:
            before[run, node] = run.referenced(node)

    def _report(self, before: Before) -> None:
        for (run, node), was in before.items():
            self._announcements.claimed(node, run, was)
        for run in {run for run, _ in before}:
            self.tree.settle(run)

    def check(self, branches: Iterable[Branch]) -> None:
        """Assert that runs carry exactly the claims of these branches, and holdings the counts that follow."""
        expected: dict[tuple[Run, str, Phase], list[int]] = {}
        claimed = 0
        for branch in branches:
            claim = branch.claim
            claimed += _weight(claim, branch.blocks)
            assert claim is not None or not branch.kept
            for phase in (Phase.PREFILL, Phase.DECODE) if claim is not None else ():
                home = _home(claim, phase)
                for run, end in path(claim.tip) if claim is not None and home is not None else ():
                    expected.setdefault((run, home or "", phase), []).append(end)
            for run in branch.kept:
                assert any(owner is branch for owner, _ in run.kept)
        found: dict[tuple[Run, str, Phase], list[int]] = {}
        for run in self.tree.known():
            for (node, phase), ends in run.claims.items():
                assert ends.top == max(ends.counts), (ends.top, ends.counts)
                found[run, node, phase] = [end for end, times in ends.counts.items() for _ in range(times)]
            for (branch, node), kept in run.kept.items():
                sets.check(kept)
                assert kept
                assert run in branch.kept
                assert branch.claim is not None
                assert branch.claim.prefill != node
                assert kept[-1] <= dict(path(branch.claim.tip))[run]
            assert all(branch.claim is not None and branch.claim.tip[0] is run for branch in run.tips)
        assert {k: sorted(v) for k, v in expected.items()} == {k: sorted(v) for k, v in found.items()}
        assert claimed == self.claimed_blocks


def _home(claim: Claim | None, phase: Phase) -> str | None:
    if claim is None:
        return None
    return claim.prefill if phase is Phase.PREFILL else claim.decode


def _weight(claim: Claim | None, blocks: int) -> int:
    """Claims held: one per block and phase."""
    return 0 if claim is None else blocks * ((claim.prefill is not None) + (claim.decode is not None))
