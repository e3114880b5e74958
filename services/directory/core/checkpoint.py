"""The directory's state on disk: what a restart cannot hear again. Where copies lie is not in it: nodes say so anew.

It is taken and put back in pieces, between which the directory goes on. A key names its block and everything before
it, so chains of keys are true whenever they were written, in whatever order and however often; what changed of a branch
after it was taken is taken again, and the last word counts. So all parts together are the state as of the last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from schemas.branch import BranchKind, BranchState
from schemas.codec import Count, Decoder, Message, SmallCount
from schemas.kv import keys_of
from schemas.phase import Phase
from services.directory.core.branch import Anchor, Branch, Claim
from services.directory.core.directory import Directory
from services.directory.core.run import Run, key_from_end, keys_view

Key = Annotated[int, Meta(ge=0)]
"""A short key; MessagePack has none above uint64."""
IDS_AT_ONCE = 4096
_DONE = object()


class SavedChain(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Packed keys of blocks that follow each other behind block `parent`; None at the start of a context."""

    keys: bytes
    parent: Key | None

    def __post_init__(self) -> None:
        keys_of(self.keys)


class SavedBranch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A branch. `seen`: its last activity, by the clock of `End.now`. `tip`: the last key of its context. `kept`: nodes
    and the packed keys of blocks on which it keeps a claim there."""

    tenant: str
    id: str
    parent: tuple[str, str] | None
    kind: BranchKind
    version: SmallCount
    life: SmallCount
    state: BranchState
    inferred: bool
    fresh: bool
    seen: float
    blocks: SmallCount
    tip: Key | None
    homes: tuple[str | None, str | None]
    last: tuple[str | None, str | None]
    anchor: Anchor | None
    departed: list[Anchor]
    kept: list[tuple[str, bytes]]
    family: str | None
    grown: bool
    compacting: bool
    left: bool
    unsettled: bool
    first_blocks: Count
    shared_blocks: Count
    began_blocks: Count
    confirmed: Count
    heir: tuple[str, str] | None
    parent_seen: float | None
    with_descendants: bool = False


class End(msgspec.Struct, frozen=True, array_like=True):
    """Everything is as of stream message `sequence`, at `now` of the monotonic clock and Unix time `wall`."""

    sequence: Count
    now: float
    wall: float
    phases: dict[str, tuple[Phase, Count]]


class Part(Message, frozen=True, kw_only=True):
    """A part of a checkpoint; only the last one has an `end`. `gone`: branches that are not known any more."""

    chains: list[SavedChain]
    branches: list[SavedBranch]
    gone: list[tuple[str, str]]
    events: list[str]
    media: list[tuple[Key, bytes]]
    end: End | None = None


PART = Decoder(Part)


class Saving:
    """A checkpoint being taken: `step` until nothing is left, `take` what has gathered between two turns of the loop,
    and in the turn in which nothing is left take the `end`. `close` in any case."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._journal = directory.tree.journal
        self._journal.begin()
        self._whole: Iterator[None] = self._everything()
        self._newest_event: str | None = None
        self._empty()

    def step(self) -> bool:
        """Take a run, a branch or a lot of event ids; False when nothing is left as of now."""
        journal = self._journal
        if next(self._whole, _DONE) is not _DONE:
            return True
        if journal.chains:
            parent, packed = journal.chains.popleft()
            self._chains.append(SavedChain(packed, parent))
        elif journal.branches:
            self._take(journal.branches.popitem(last=False)[0])
        else:
            return False
        return True

    def take(self) -> Part:
        """What was taken since the last part."""
        return self._part(None)

    def end(self, sequence: int, now: float, wall: float) -> Part:
        """The last part; only when `step` has just said that nothing is left."""
        self._events += self._directory.events.applied.after(self._newest_event)
        return self._part(End(sequence, now, wall, dict(self._directory.phases)))

    def close(self) -> None:
        """Let the directory change unnoticed again."""
        self._whole = iter(())
        self._journal.end()

    def _everything(self) -> Iterator[None]:
        """All there is, parents before what hangs below them."""
        directory = self._directory
        media = directory.tree.media.of
        for run in directory.tree.known():
            if run.keys:
                self._chains.append(SavedChain(run.packed(0, len(run.keys)), run.before(0)))
                if not media.keys().isdisjoint(run.keys):
                    self._media += [(key, media[key]) for key in run.keys if key in media]
                yield
        for branch in directory.branches.each():
            self._take(branch)
            yield
        ids = list(directory.events.applied)
        for start in range(0, len(ids), IDS_AT_ONCE):
            self._events += ids[start : start + IDS_AT_ONCE]
            self._newest_event = ids[-1]
            yield

    def _take(self, branch: Branch) -> None:
        known = self._directory.branches.get(branch.key)
        if known is branch:
            self._directory.references.settle(branch)
            self._branches.append(_saved(branch))
        elif known is None:
            self._gone.append(branch.key)
        self._journal.branches.pop(branch, None)

    def _part(self, end: End | None) -> Part:
        media, self._journal.media = [*self._media, *self._journal.media], []
        part = Part(
            chains=self._chains, branches=self._branches, gone=self._gone, events=self._events, media=media, end=end
        )
        self._empty()
        return part

    def _empty(self) -> None:
        self._chains: list[SavedChain] = []
        self._branches: list[SavedBranch] = []
        self._gone: list[tuple[str, str]] = []
        self._events: list[str] = []
        self._media: list[tuple[int, bytes]] = []


def restore(directory: Directory, parts: Iterable[Part], now: float, wall: float) -> Iterator[None]:
    """Bring a new directory to the state of a checkpoint, a run or a branch a step; time went on meanwhile, but never
    back."""
    branches: dict[tuple[str, str], SavedBranch] = {}
    media: dict[int, bytes] = {}
    end = None
    directory.values.now = now
    for part in parts:
        for chain in part.chains:
            directory.tree.insert(chain.parent, keys_view(chain.keys))
            yield
        for branch in part.branches:
            branches.pop((branch.tenant, branch.id), None)
            branches[branch.tenant, branch.id] = branch
        for key in part.gone:
            branches.pop(key, None)
        directory.events.applied.add(part.events)
        media.update(part.media)
        end = part.end
    assert end is not None, "a checkpoint without an end"
    away_s = max(0.0, wall - end.wall) + end.now
    for block, shown in media.items():
        if directory.tree.find(block) is not None:
            directory.tree.media.of[block] = shown
        yield
    yield from _restore_branches(directory, branches.values(), now - away_s)
    directory.phases |= end.phases


def _restore_branches(directory: Directory, branches: Iterable[SavedBranch], later_s: float) -> Iterator[None]:
    """In the order of their last activity."""
    oldest_first = sorted(branches, key=lambda each: each.seen)
    for saved in oldest_first:
        branch = _branch(saved, later_s)
        directory.branches.restore(branch)
        place = directory.tree.find(saved.tip) if saved.tip is not None else None
        if place is not None:
            directory.references.claim(branch, Claim((place[0], place[1] + 1), *saved.homes), saved.blocks)
        for node, packed in saved.kept:
            for run, first, last in directory.tree.locate(keys_view(packed))[0]:
                directory.references.restore_kept(branch, run, node, [first, last])
        yield
    for saved in oldest_first:
        left = directory.branches.get((saved.tenant, saved.id)) if saved.heir is not None else None
        if left is not None and saved.heir is not None:
            left.heir = directory.branches.get(saved.heir)


def _saved(branch: Branch) -> SavedBranch:
    claim = branch.claim
    return SavedBranch(
        tenant=branch.key[0],
        id=branch.key[1],
        parent=branch.parent,
        kind=branch.kind,
        version=branch.version,
        life=branch.life,
        state=branch.state,
        inferred=branch.inferred,
        fresh=branch.fresh,
        seen=branch.seen,
        blocks=branch.blocks,
        tip=key_from_end(claim.tip, 0) if claim is not None else None,
        homes=(claim.prefill, claim.decode) if claim is not None else (None, None),
        last=(branch.prefill, branch.decode),
        anchor=branch.anchor,
        departed=list(branch.departed),
        kept=[(node, run.of(run.kept[branch, node])) for run, node in _kept(branch)],
        family=branch.family,
        grown=branch.grown,
        compacting=branch.compacting,
        left=branch.left,
        unsettled=branch.unsettled,
        first_blocks=branch.first_blocks,
        shared_blocks=branch.shared_blocks,
        began_blocks=branch.began_blocks,
        confirmed=branch.confirmed,
        heir=branch.heir.key if branch.heir is not None else None,
        parent_seen=branch.parent_seen,
        with_descendants=branch.with_descendants,
    )


def _kept(branch: Branch) -> list[tuple[Run, str]]:
    return [(run, node) for run in branch.kept for owner, node in run.kept if owner is branch]


def _branch(saved: SavedBranch, later_s: float) -> Branch:
    branch = Branch((saved.tenant, saved.id), saved.seen + later_s)
    branch.parent, branch.kind, branch.version, branch.life = saved.parent, saved.kind, saved.version, saved.life
    branch.state, branch.inferred, branch.fresh, branch.blocks = saved.state, saved.inferred, saved.fresh, saved.blocks
    branch.prefill, branch.decode = saved.last
    branch.anchor, branch.departed = saved.anchor, saved.departed
    branch.family, branch.grown, branch.compacting = saved.family, saved.grown, saved.compacting
    branch.left, branch.unsettled = saved.left, saved.unsettled
    branch.first_blocks, branch.shared_blocks = saved.first_blocks, saved.shared_blocks
    branch.began_blocks, branch.confirmed = saved.began_blocks, saved.confirmed
    branch.with_descendants = saved.with_descendants
    branch.parent_seen = saved.parent_seen + later_s if saved.parent_seen is not None else None
    return branch
