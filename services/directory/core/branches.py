"""All branches: who they are, when they were last heard of, and which of them end."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from schemas.branch import LARGEST_LIFE, BranchKind, BranchState, next_version
from services.directory.core.anchors import Anchors
from services.directory.core.branch import Branch, BranchKey
from services.directory.core.departures import others_left_before
from services.directory.core.lineage import REWRITABLE_BLOCKS
from services.directory.core.references import References


class Branches:
    """Active branches in order of their last activity, and the others, of which `inactive_kept` are remembered so that
    late events of them are known for what they are. An active branch silent for `lease_s` is demoted: it claims
    nothing until its next request."""

    def __init__(self, references: References, lease_s: float, inactive_kept: int) -> None:
        self._references = references
        self._journal = references.tree.journal
        self._lease_s = lease_s
        self._inactive_kept = inactive_kept
        self._active: OrderedDict[BranchKey, Branch] = OrderedDict()
        self._inactive: OrderedDict[BranchKey, Branch] = OrderedDict()
        self._table: list[Branch | None] = []
        self._free: list[int] = []
        self._children: dict[BranchKey, dict[BranchKey, None]] = {}
        self.anchors = Anchors()

    def __len__(self) -> int:
        return len(self._active) + len(self._inactive)

    @property
    def active(self) -> int:
        return len(self._active)

    def get(self, key: BranchKey) -> Branch | None:
        return self._active.get(key) or self._inactive.get(key)

    def newest_first(self) -> Iterator[Branch]:
        yield from reversed(self._active.values())
        yield from reversed(self._inactive.values())

    def each(self) -> Iterator[Branch]:
        """All of them, in no order; those that come while one goes through them may be left out."""
        number = 0
        while number < len(self._table):
            branch = self._table[number]
            number += 1
            if branch is not None:
                yield branch

    def open(self, key: BranchKey, now: float) -> Branch:
        """A new branch; `key` must be unknown."""
        branch = self._active[key] = Branch(key, now)
        self._enter(branch)
        return branch

    def _enter(self, branch: Branch) -> None:
        branch.number = self._free.pop() if self._free else len(self._table)
        if branch.number == len(self._table):
            self._table.append(branch)
        else:
            self._table[branch.number] = branch

    def adopt(self, branch: Branch, parent: BranchKey | None, kind: BranchKind | None) -> None:
        """Note where a branch comes from; the first word on it counts, and nobody is its own parent."""
        if kind is not None and kind is not BranchKind.TRANSIENT and branch.kind is BranchKind.MAIN:
            branch.kind = kind
        if parent is not None and branch.parent is None and parent != branch.key:
            branch.parent = parent
            self._children.setdefault(parent, {})[branch.key] = None

    def touch(self, branch: Branch, now: float) -> None:
        """Any sign of life renews the lease of an active branch."""
        if branch.active:
            branch.seen = now
            self._active.move_to_end(branch.key)
            self._journal.changed(branch)

    def revive(self, branch: Branch, now: float) -> None:
        """A request was answered: the branch is active, whatever it was."""
        branch.seen = now
        branch.state = BranchState.ACTIVE
        self._inactive.pop(branch.key, None)
        self._active[branch.key] = branch
        self._active.move_to_end(branch.key)

    def end(self, branch: Branch, cascade: bool) -> None:
        """The branch ends, and with `cascade` all that descends from it, though there may be thousands: their claims
        go one branch at a time."""
        waiting, seen = [branch.key], {branch.key}
        while waiting:
            current = self.get(waiting.pop())
            if current is None:
                continue
            if current is not branch:
                self._references.leave(current)
            self._retire(current, BranchState.ENDED)
            current.with_descendants = cascade
            if cascade:
                below = [key for key in self._children.get(current.key, ()) if key not in seen]
                seen.update(below)
                waiting += below

    def overdue(self, now: float) -> bool:
        """Whether the lease of the longest silent active branch is over."""
        branch = next(iter(self._active.values()), None)
        return branch is not None and now - branch.seen >= self._lease_s

    def demote(self) -> None:
        """Demote the longest silent active branch. What it and the one it left are to each other is settled now."""
        branch = next(iter(self._active.values()))
        self._retire(branch, BranchState.IDLE)
        self._settle(branch)

    def departs(self, heir: Branch, left: Branch, shared_blocks: int) -> None:
        """`heir` is new and has `shared_blocks` of its context from `left`; what it is to it is settled later."""
        heir.unsettled, heir.shared_blocks = True, shared_blocks
        heir.parent_seen, heir.began_blocks = left.seen, left.began_blocks
        left.left, left.heir = True, heir
        self._journal.changed(left)

    def used(self, branch: Branch) -> None:
        """A request of the branch was answered. If others left it, they are forks of it, or have nothing to do with it.
        If it left another one that looks compacted, that one claims nothing until it is used again."""
        if branch.left:
            self._part(branch, self._settled(branch))
        parent = self._in_question(branch)
        if parent is None:
            return
        if branch.seen - parent.seen >= self._lease_s:
            self._settle(parent)
        elif parent.active and _looks_compacted(parent, branch):
            self._retire(parent, BranchState.IDLE)

    def _in_question(self, branch: Branch) -> Branch | None:
        """The branch that this one left, while it is open what became of it."""
        parent = self.get(branch.parent) if branch.unsettled and branch.parent is not None else None
        return parent if parent is not None and parent.left else None

    def _settle(self, branch: Branch) -> None:
        """A branch was silent for its lease: if one other left its path since its last use, it was compacted, and the
        other continues it."""
        former = self._in_question(branch)
        if former is not None and former is not branch:
            self._settle(former)
        heirs = self._settled(branch)
        if len(heirs) == 1:
            heirs[0].kind, heirs[0].version = branch.kind, next_version(branch.version)
        else:
            self._part(branch, heirs)

    def _settled(self, branch: Branch) -> list[Branch]:
        """The branches that left this one since its last use, no longer in question."""
        branch.left, branch.heir = False, None
        self._journal.changed(branch)
        children = [self.get(key) for key in self._children.get(branch.key, ())]
        heirs = [child for child in children if child is not None and child.unsettled]
        for heir in heirs:
            heir.unsettled = False
            self._journal.changed(heir)
        return heirs

    def _part(self, branch: Branch, heirs: list[Branch]) -> None:
        """Who shares less than the branch's first prompt has none of its conversation: another agent that begins
        alike."""
        for heir in heirs:
            if not _conversation_shared(heir, branch):
                self._disown(heir)
                self.adopt(heir, (heir.key[0], heir.family) if heir.family is not None else None, None)
                heir.kind, heir.began_blocks = BranchKind.MAIN, heir.first_blocks

    def _disown(self, branch: Branch) -> None:
        if branch.parent is not None:
            siblings = self._children[branch.parent]
            del siblings[branch.key]
            if not siblings:
                del self._children[branch.parent]
            branch.parent = None

    def restore(self, branch: Branch) -> None:
        """Take in a branch out of a checkpoint, in order of last activity."""
        (self._active if branch.active else self._inactive)[branch.key] = branch
        self._enter(branch)
        if branch.parent is not None:
            self._children.setdefault(branch.parent, {})[branch.key] = None
        if branch.state is not BranchState.ENDED:
            self.anchors.add(branch)

    def _retire(self, branch: Branch, state: BranchState) -> None:
        over = state is BranchState.ENDED and branch.state is not BranchState.ENDED
        branch.state = state
        if branch not in self._references.leaving:
            self._references.claim(branch, None, branch.blocks)
        if over:
            branch.life = min(branch.life + 1, LARGEST_LIFE)
            self.anchors.remove(branch)
            branch.departed = []
        self._active.pop(branch.key, None)
        self._inactive[branch.key] = branch
        self._inactive.move_to_end(branch.key)
        while len(self._inactive) > self._inactive_kept:
            _, oldest = self._inactive.popitem(last=False)
            self._references.settle(oldest)
            self.anchors.remove(oldest)
            self._disown(oldest)
            self._table[oldest.number] = None
            self._free.append(oldest.number)
            self._journal.changed(oldest)

    def check(self) -> None:
        for key, branch in self._active.items():
            assert branch.key == key
            assert branch.active
        for key, branch in self._inactive.items():
            assert branch.key == key
            assert not branch.active
            assert branch.claim is None or branch in self._references.leaving
        assert not self._active.keys() & self._inactive.keys()
        seen = [branch.seen for branch in self._active.values()]
        assert seen == sorted(seen), "active branches are not in order of their last activity"
        known = {branch.key for branch in self.newest_first()}
        assert {branch.key: self.get(branch.key) for branch in self.each()} == {b.key: b for b in self.newest_first()}
        assert len(self) + len(self._free) == len(self._table)
        assert {key for group in self._children.values() for key in group} <= known
        self.anchors.check()


def _conversation_shared(heir: Branch, left: Branch) -> bool:
    """Whether `heir` has more from the branch it left than what that one began with."""
    return heir.shared_blocks >= left.first_blocks - REWRITABLE_BLOCKS


def _looks_compacted(branch: Branch, heir: Branch) -> bool:
    """Whether `heir` goes on from a compaction of `branch`, by all that shows before the lease is over: it goes on, the
    branch does not, it has none of its conversation, yet more than others begin with, and it began with more than the
    branch once did, but with less than the branch has now. A context written anew at its full length may be an agent's
    copy for another one, for which it waits: that shows with time only."""
    return (
        heir.grown
        and branch.seen == heir.parent_seen
        and branch.claim is not None
        and not _conversation_shared(heir, branch)
        and branch.began_blocks < heir.first_blocks < branch.blocks
        and others_left_before(branch.claim.tip, heir.shared_blocks)
    )
