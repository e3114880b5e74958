"""What a request is to its branch: the same judgement for a prompt that arrives and for an answer that was given."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from schemas.branch import BranchKind, BranchState, Compaction, next_version
from services.directory.core.branch import Anchor, Branch

KeyAt = Callable[[int], int | None]
"""The key of a context's block by number; None beyond its end or where it is not known."""
REWRITABLE_BLOCKS = 2
"""Chat templates rewrite the tail of a prompt: its last blocks need not come back in the next one."""
DEPARTED_KEPT = 4


class Lineage(StrEnum):
    OPENS = "opens"
    EXTENDS = "extends"
    FORK = "fork"
    SUBAGENT = "subagent"
    COMPACT = "compact"
    TRANSIENT = "transient"


class Signals(NamedTuple):
    """What a request says of itself: its context's version, that it is a side request, what it says of a compaction."""

    version: int | None = None
    side: bool = False
    compaction: Compaction | None = None


SILENT = Signals()


class Judgement(NamedTuple):
    """`version` the branch has with this request; `departs` the anchor that a compaction by inference continues."""

    lineage: Lineage
    version: int
    departs: Anchor | None = None


def anchor_of(blocks: int, key_at: KeyAt) -> Anchor | None:
    """The anchor of a prompt of `blocks` blocks; None when it is shorter than one block.

    Keys are chained, so one equal key proves that all blocks up to it are contained. At least the first
    block must come back, else a short prompt would be extended by everything.
    """
    number = max(1, blocks - REWRITABLE_BLOCKS) - 1
    key = key_at(number) if blocks else None
    return None if key is None else Anchor(blocks, number, key)


def extends(anchor: Anchor | None, blocks: int, key_at: KeyAt) -> bool:
    """Whether a prompt of `blocks` blocks contains all blocks of the last prompt but at most the last two."""
    return anchor is None or (anchor.number < blocks and key_at(anchor.number) == anchor.key)


def judge(branch: Branch, signals: Signals, blocks: int, key_at: KeyAt) -> Judgement:
    """What a request of a known branch is to it. `blocks`: full blocks of its prompt.

    A higher version is an explicit compaction, a lower one a request of a context that is gone. Compactions that number
    no version count once until the next request. Without a signal a request that leaves the context is transient, and a
    compaction once a longer one extends it; unless what it replaces was shorter and never extended: then that was the
    side request, and this opens the branch. A request of an ended branch opens it anew, at the version it names.
    """
    version = signals.version
    if signals.side:
        return Judgement(Lineage.TRANSIENT, branch.version)
    if branch.state is BranchState.ENDED:
        return Judgement(Lineage.OPENS, branch.version if version is None else version)
    if version is not None and version < branch.version:
        return Judgement(Lineage.TRANSIENT, branch.version)
    departs = None
    if branch.departed:
        departs = next((a for a in branch.departed if blocks > a.blocks and extends(a, blocks, key_at)), None)
    if version is not None and version > branch.version:
        return Judgement(_first(branch), version, departs)
    if signals.compaction is Compaction.DONE and not branch.fresh:
        return Judgement(Lineage.COMPACT, next_version(branch.version), departs)
    if branch.fresh:
        return Judgement(_first(branch), branch.version)
    if extends(branch.anchor, blocks, key_at):
        return Judgement(Lineage.EXTENDS, branch.version)
    if branch.compacting:
        return Judgement(Lineage.COMPACT, next_version(branch.version))
    if departs is None:
        return Judgement(Lineage.TRANSIENT, branch.version)
    if branch.anchor is not None and not branch.grown and branch.anchor.blocks < blocks:
        return Judgement(opening(branch.kind), branch.version, departs)
    return Judgement(Lineage.COMPACT, next_version(branch.version), departs)


def accepted(branch: Branch, judgement: Judgement, anchor: Anchor | None) -> None:
    """Book a request that became the branch's context. The context left by an inferred compaction may come back."""
    if judgement.departs is not None and branch.anchor is not None:
        left = [branch.anchor, *branch.departed]
        branch.departed = [a for a in left if a != judgement.departs][:DEPARTED_KEPT]
    elif judgement.lineage is not Lineage.EXTENDS:
        branch.departed = []
    branch.grown = judgement.lineage is Lineage.EXTENDS or judgement.departs is not None
    branch.confirmed += judgement.lineage is Lineage.EXTENDS
    branch.version, branch.anchor, branch.fresh = judgement.version, anchor, False
    branch.compacting = False


def departed(branch: Branch, anchor: Anchor | None) -> None:
    """Remember a transient request, so that one that extends it makes it the branch's context."""
    if anchor is not None and anchor not in branch.departed:
        branch.departed = [anchor, *branch.departed][:DEPARTED_KEPT]


def opening(kind: BranchKind) -> Lineage:
    """What the first request of a branch of this kind is."""
    if kind is BranchKind.FORK:
        return Lineage.FORK
    return Lineage.SUBAGENT if kind is BranchKind.SUBAGENT else Lineage.OPENS


def _first(branch: Branch) -> Lineage:
    """A request that defines the context: the first one opens the branch, any later one compacts it."""
    return opening(branch.kind) if branch.anchor is None and branch.fresh else Lineage.COMPACT
