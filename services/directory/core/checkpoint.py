"""The directory's state on disk: what a restart cannot hear again. Where copies lie is not in it: nodes say so anew."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from schemas.branch import BranchKind, BranchState
from schemas.codec import Decoder, Message
from schemas.kv import keys_of
from schemas.phase import Phase
from services.directory.core.branch import Anchor, Branch, Claim
from services.directory.core.directory import Directory
from services.directory.core.run import Run, keys_view

Count = Annotated[int, Meta(ge=0)]


class SavedRun(msgspec.Struct, frozen=True, array_like=True):
    """A run: its packed keys, and the index of its parent among the runs before it, or the key it waits for."""

    keys: bytes
    parent: Count | None
    offset: Count
    orphan_of: Count | None

    def __post_init__(self) -> None:
        keys_of(self.keys)


class SavedBranch(msgspec.Struct, frozen=True, array_like=True):
    """A branch; runs by index. `silent_s`: since its last activity. `kept`: (run, node, spans) of kept claims."""

    tenant: str
    id: str
    parent: tuple[str, str] | None
    kind: BranchKind
    version: Count
    life: Count
    state: BranchState
    inferred: bool
    fresh: bool
    silent_s: float
    blocks: Count
    tip: tuple[Count, Count] | None
    homes: tuple[str | None, str | None]
    last: tuple[str | None, str | None]
    anchor: Anchor | None
    departed: list[Anchor]
    kept: list[tuple[Count, str, list[int]]]
    family: str | None = None
    grown: bool = False
    compacting: bool = False
    left: bool = False
    unsettled: bool = False
    first_blocks: Count = 0
    shared_blocks: Count = 0
    began_blocks: Count = 0
    confirmed: Count = 0


class Checkpoint(Message, frozen=True, kw_only=True):
    """Everything as of stream message `sequence`, at Unix time `wall`. Branches: least recently active first."""

    sequence: Count
    wall: float
    runs: list[SavedRun]
    branches: list[SavedBranch]
    phases: dict[str, tuple[Phase, Count]]
    events: list[str]
    media: list[tuple[int, bytes]] = []


CHECKPOINT = Decoder(Checkpoint)


def save(directory: Directory, sequence: int, now: float, wall: float) -> Checkpoint:
    """Copy the state; cost: a few microseconds a run and a branch, and 8 bytes a block."""
    number: dict[Run, int] = {}
    runs: list[SavedRun] = []
    for run in directory.tree.known():
        number[run] = len(runs)
        parent = number[run.parent] if run.parent in number and run.parent is not None else None
        runs.append(SavedRun(run.packed(0, len(run.keys)), parent, run.offset, run.orphan_of))
    for branch in directory.branches.newest_first():
        directory.references.settle(branch)
    return Checkpoint(
        sequence=sequence,
        wall=wall,
        runs=runs,
        branches=[_saved(branch, number, now) for branch in reversed(list(directory.branches.newest_first()))],
        phases=dict(directory.phases),
        events=list(directory.events.applied),
        media=list(directory.tree.media.of.items()),
    )


def restore(directory: Directory, checkpoint: Checkpoint, now: float, wall: float) -> None:
    """Bring a new directory to the state of a checkpoint; time went on meanwhile, but never back."""
    away_s = max(0.0, wall - checkpoint.wall)
    directory.values.now = now
    runs: list[Run] = []
    for saved in checkpoint.runs:
        parent = directory.tree.root if saved.parent is None else runs[saved.parent]
        runs.append(directory.tree.graft(parent, saved.offset, saved.orphan_of, keys_view(saved.keys)))
    for entry in checkpoint.branches:
        branch = _branch(entry, now - away_s)
        directory.branches.restore(branch)
        if entry.tip is not None:
            tip = (runs[entry.tip[0]], entry.tip[1])
            directory.references.claim(branch, Claim(tip, *entry.homes), entry.blocks)
        for index, node, spans in entry.kept:
            directory.references.restore_kept(branch, runs[index], node, spans)
    directory.tree.media.of.update(checkpoint.media)
    directory.phases |= checkpoint.phases
    directory.events.applied.update(dict.fromkeys(checkpoint.events))


def _saved(branch: Branch, number: dict[Run, int], now: float) -> SavedBranch:
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
        silent_s=now - branch.seen,
        blocks=branch.blocks,
        tip=(number[claim.tip[0]], claim.tip[1]) if claim is not None else None,
        homes=(claim.prefill, claim.decode) if claim is not None else (None, None),
        last=(branch.prefill, branch.decode),
        anchor=branch.anchor,
        departed=list(branch.departed),
        kept=[
            (number[run], node, list(spans))
            for run in branch.kept
            for (owner, node), spans in run.kept.items()
            if owner is branch
        ],
        family=branch.family,
        grown=branch.grown,
        compacting=branch.compacting,
        left=branch.left,
        unsettled=branch.unsettled,
        first_blocks=branch.first_blocks,
        shared_blocks=branch.shared_blocks,
        began_blocks=branch.began_blocks,
        confirmed=branch.confirmed,
    )


def _branch(saved: SavedBranch, now: float) -> Branch:
    branch = Branch((saved.tenant, saved.id), now - saved.silent_s)
    branch.parent, branch.kind, branch.version, branch.life = saved.parent, saved.kind, saved.version, saved.life
    branch.state, branch.inferred, branch.fresh, branch.blocks = saved.state, saved.inferred, saved.fresh, saved.blocks
    branch.prefill, branch.decode = saved.last
    branch.anchor, branch.departed = saved.anchor, saved.departed
    branch.family, branch.grown, branch.compacting = saved.family, saved.grown, saved.compacting
    branch.left, branch.unsettled = saved.left, saved.unsettled
    branch.first_blocks, branch.shared_blocks = saved.first_blocks, saved.shared_blocks
    branch.began_blocks, branch.confirmed = saved.began_blocks, saved.confirmed
    return branch
