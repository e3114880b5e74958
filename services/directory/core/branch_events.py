"""Branch events applied: every row of the table of reference counts, each event once, older versions never."""

from __future__ import annotations

from schemas.branch import BranchEvent, BranchEventType, BranchKind, BranchState, Compaction, next_version
from services.directory.core import lineage
from services.directory.core.branch import Branch, BranchKey, Claim
from services.directory.core.branches import Branches
from services.directory.core.counters import Counters
from services.directory.core.departures import common_blocks
from services.directory.core.event_ids import EventIds
from services.directory.core.lineage import Lineage, Signals
from services.directory.core.pending import PendingPrefixes
from services.directory.core.references import References
from services.directory.core.run import Tip, depth, key_from_end, keys_view

ROUTER = "router"
"""The only source that may report contexts. The shell checks that an event came on the subjects of its tenant."""
KINDS = {BranchEventType.FORK: BranchKind.FORK, BranchEventType.SUBAGENT: BranchKind.SUBAGENT}
OPENINGS: dict[str, BranchKind] = {Lineage.FORK: BranchKind.FORK, Lineage.SUBAGENT: BranchKind.SUBAGENT}
"""What a branch is whose first request did not say so, by what the directory took that request for."""


class BranchEvents:
    """Applies branch events to branches and their claims. `event_ids` ids are remembered to tell repeats."""

    def __init__(
        self, references: References, branches: Branches, pending: PendingPrefixes, counters: Counters, event_ids: int
    ) -> None:
        self._references = references
        self._branches = branches
        self._pending = pending
        self._counters = counters
        self.applied = EventIds(event_ids)

    def apply(self, event: BranchEvent, now: float) -> None:
        """One event; a repeat, a late one or one its source may not send changes nothing but a counter."""
        if event.source != ROUTER and event.type is BranchEventType.CONTEXT:
            self._counters.foreign_events += 1
            return
        if event.id in self.applied:
            self._counters.duplicate_events += 1
            return
        self.applied.add((event.id,))
        key = (event.tenant, event.branch)
        parent = None if event.parent is None else (event.tenant, event.parent)
        match event.type:
            case BranchEventType.CONTEXT:
                self._context(key, parent, event, now)
            case BranchEventType.END:
                self._end(key, event, now)
            case BranchEventType.KEEPALIVE:
                self._keepalive(key, now)
            case BranchEventType.COMPACT:
                self._compact(key, event, now)
            case BranchEventType.OPEN | BranchEventType.FORK | BranchEventType.SUBAGENT:
                self._open(key, parent, event, now)
        branch = self._branches.get(key)
        if branch is not None:
            self._references.tree.journal.changed(branch)

    def _open(self, key: BranchKey, parent: BranchKey | None, event: BranchEvent, now: float) -> None:
        """A branch that turns out to descend from one that has ended with all its descendants has ended too, as if this
        had come before that end; its next request revives it."""
        branch = self._current(key, event)
        new = branch is None and self._branches.get(key) is None
        if new:
            branch = self._branches.open(key, now)
            branch.version = event.version or 0
        if branch is None:
            return
        had_parent = branch.parent is not None
        self._branches.adopt(branch, parent, KINDS.get(event.type))
        if not had_parent and branch.anchor is None and self._ended_with_descendants(branch.parent):
            self._counters.late_events += 1
            self._branches.end(branch, cascade=True)
        elif not new:
            self._branches.touch(branch, now)
        elif event.type is BranchEventType.FORK:
            self._inherit(branch)

    def _ended_with_descendants(self, key: BranchKey | None) -> bool:
        branch = self._branches.get(key) if key is not None else None
        return branch is not None and branch.state is BranchState.ENDED and branch.with_descendants

    def _inherit(self, branch: Branch) -> None:
        """A fork reuses its parent's context from the start: it claims what its parent claims."""
        parent = self._branches.get(branch.parent) if branch.parent is not None else None
        if parent is not None:
            self._references.settle(parent)
            if parent.claim is not None:
                self._references.claim(branch, parent.claim, parent.blocks)
                branch.prefill, branch.decode = parent.prefill, parent.decode

    def _end(self, key: BranchKey, event: BranchEvent, now: float) -> None:
        """The end of an unknown branch is kept too: what follows is late."""
        branch = self._branches.get(key)
        if branch is None:
            branch = self._branches.open(key, now)
            branch.version = event.version or 0
        elif branch.state is BranchState.ENDED or _older(event, branch):
            self._counters.late_events += 1
            return
        self._branches.end(branch, event.cascade)

    def _keepalive(self, key: BranchKey, now: float) -> None:
        branch = self._branches.get(key)
        if branch is None or not branch.active:
            self._counters.late_events += 1
            return
        self._branches.touch(branch, now)

    def _compact(self, key: BranchKey, event: BranchEvent, now: float) -> None:
        """The version rises at once; claims follow with the first context of that version. A request that says it is
        the first after a compaction raises it only where no event did. At the largest version one that names none still
        makes the next request define the context."""
        branch = self._current(key, event)
        if branch is None:
            if self._branches.get(key) is None:
                self._branches.open(key, now).version = 1 if event.version is None else event.version
            return
        version = next_version(branch.version) if event.version is None else event.version
        if version > branch.version or event.version is None:
            branch.version, branch.fresh, branch.departed = version, True, []
        self._branches.touch(branch, now)

    def _current(self, key: BranchKey, event: BranchEvent) -> Branch | None:
        """The branch, unless it is unknown; or ended, or beyond the event's version: then the event is late."""
        branch = self._branches.get(key)
        if branch is not None and (branch.state is BranchState.ENDED or _older(event, branch)):
            self._counters.late_events += 1
            return None
        return branch

    def _context(self, key: BranchKey, parent: BranchKey | None, event: BranchEvent, now: float) -> None:
        if event.request is not None:
            self._pending.end(event.request)
        branch = self._branches.get(key)
        if branch is not None and _of_a_life_that_is_over(event, branch):
            self._counters.late_events += 1
            return
        if branch is None:
            branch = self._branches.open(key, now)
            branch.version, branch.inferred, branch.family = event.version or 0, event.inferred, event.family
        self._branches.adopt(branch, parent, event.kind or OPENINGS.get(event.lineage))
        self._branches.touch(branch, now)
        self._references.settle(branch)
        blocks = event.blocks or 0
        tip = self._tip(branch, event, blocks) if blocks else None
        if blocks and tip is None:
            self._counters.unresolved_contexts += 1
            return
        self._follow(branch, event, tip, blocks, now)

    def _follow(self, branch: Branch, event: BranchEvent, tip: Tip | None, blocks: int, now: float) -> None:
        """Claims go to exactly the blocks of the new context, unless the request was only a transient one: that shows
        no more than that its branch lives. Within a version the stream's order counts: a shorter context may be a late
        one or a template that drops older output, and nothing in it tells which."""

        def key_at(number: int) -> int | None:
            return key_from_end(tip, blocks - 1 - number) if tip is not None and number < blocks else None

        prompt = blocks if event.prompt_blocks is None else min(event.prompt_blocks, blocks)
        judgement = lineage.judge(branch, _signals(event), prompt, key_at)
        anchor = lineage.anchor_of(prompt, key_at)
        if judgement.lineage is Lineage.TRANSIENT:
            self._counters.transient_requests += 1
            lineage.departed(branch, anchor)
            branch.compacting = branch.compacting or event.compaction is Compaction.SUMMARY
            if branch.state is BranchState.ENDED:
                self._branches.revive(branch, now)
            return
        opened = branch.anchor is None
        self._branches.anchors.remove(branch)
        lineage.accepted(branch, judgement, anchor)
        if opened:
            branch.first_blocks = branch.began_blocks = prompt
        self._branches.revive(branch, now)
        self._branches.used(branch)
        self._branches.anchors.add(branch)
        branch.life = max(branch.life, event.life or 0)
        branch.prefill = event.prefill_node or branch.prefill
        branch.decode = event.decode_node or branch.decode
        claimed = branch.claim
        prefill = event.prefill_node or (claimed.prefill if claimed is not None else None)
        decode = event.decode_node or (claimed.decode if claimed is not None else None)
        self._references.claim(branch, None if tip is None else Claim(tip, prefill, decode), blocks)
        parent = self._branches.get(branch.parent) if opened and branch.inferred and branch.parent else None
        if parent is not None and parent.active and parent.claim and tip is not None and branch.kind is BranchKind.FORK:
            self._branches.departs(branch, parent, common_blocks(parent.claim.tip, tip))

    def _tip(self, branch: Branch, event: BranchEvent, blocks: int) -> Tip | None:
        """Where the context ends in the tree: at its last key, if the tree knows all that leads to it; else its new
        keys are added behind the last block of its base. None when base or keys are missing or do not fit."""
        tree = self._references.tree
        run = tree.ending_with(event.tip) if event.tip is not None else None
        if run is not None and depth((run, len(run.keys))) == blocks:
            return run, len(run.keys)
        base, keys = self._base(branch, event), keys_view(event.keys)
        fits = event.base_blocks + len(keys) == blocks and event.tip in (None, keys[-1] if len(keys) else None)
        added: Tip | None = None
        if len(keys) and fits and (base is not None or not event.base_blocks):
            pieces = tree.insert(base, keys).pieces
            if sum(last - first for _, first, last in pieces) == len(keys):
                added = pieces[-1][0], pieces[-1][2]
                if depth(added) == blocks:
                    return added
        found = tree.find(event.tip) if event.tip is not None else None
        known = (found[0], found[1] + 1) if found is not None else None
        if known is not None and depth(known) == blocks:
            return known
        return next((tip for tip in (added, known) if tip is not None and depth(tip) is None), None)

    def _base(self, branch: Branch, event: BranchEvent) -> int | None:
        """The key of the last block before the event's keys; None at the start of a context, or when it is unknown."""
        if not event.base_blocks or event.base is not None:
            return event.base if event.base_blocks else None
        back = branch.blocks - event.base_blocks
        return key_from_end(branch.claim.tip, back) if branch.claim is not None and back >= 0 else None


def _signals(event: BranchEvent) -> Signals:
    """What the request said. That it follows a compaction is in the version already if the directory was asked."""
    done = event.compaction is Compaction.DONE and event.life is not None
    return Signals(event.version, event.kind is BranchKind.TRANSIENT, None if done else event.compaction)


def _older(event: BranchEvent, branch: Branch) -> bool:
    return event.version is not None and event.version < branch.version


def _of_a_life_that_is_over(event: BranchEvent, branch: Branch) -> bool:
    """Whether the branch ended, or went on to a later version, after this request had arrived."""
    if branch.state is BranchState.ENDED:
        return event.life is None or event.life < branch.life
    return _older(event, branch) or (event.life is not None and event.life < branch.life)
