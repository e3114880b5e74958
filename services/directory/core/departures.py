"""Whose context a prompt leaves that continues none: the one branch that all below the point of departure belongs to.

A prompt that shares only what several branches share (instructions, tools) leaves nobody. One that shares what a single
live branch has for itself is that branch after a compaction, a fork of it, or a new agent that begins alike; which of
them shows when the branch is used again, or is not for the time of its lease.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.directory.core.branch import Branch
from services.directory.core.run import Run, Tip, path

LOOKED_AT = 512
"""Below one branch's own blocks there is little; where there is more than this, many have begun alike."""


def left_by(tips: list[Tip], tenant: str, family: str | None) -> Branch | None:
    """The branch that the prompt whose known path is `tips` leaves; None when there is none, or more than one.

    A branch that was left itself, and not used since, stands for the one that left it.
    """
    if not tips:
        return None
    found: Branch | None = None
    for number, below in enumerate(_below(*tips[-1])):
        if number >= LOOKED_AT:
            return None
        branch = below
        if branch is None:
            continue
        while branch.left and branch.heir is not None:
            branch = branch.heir
        ours = branch.active and branch.inferred and branch.key[0] == tenant and branch.family == family
        if not ours or branch is found:
            continue
        if found is not None:
            return None
        found = branch
    return found


def common_blocks(one: Tip, other: Tip) -> int:
    """How many leading blocks two contexts share."""
    ends = dict(path(one))
    return sum(min(end, ends.get(run, 0)) for run, end in path(other))


def others_left_before(tip: Tip, blocks: int) -> bool:
    """Whether another context left the path to `tip` within its first `blocks` blocks, the last one not counted: then
    what lies between is not what everybody begins with."""
    start = 0
    for run, end in reversed(list(path(tip))):
        if start >= blocks:
            return False
        if any(child.offset <= end and start + child.offset < blocks for child in run.children.values()):
            return True
        start += end
    return False


def _below(run: Run, offset: int) -> Iterator[Branch | None]:
    """Branches whose context ends on `run` at or behind `offset`, or on a run that hangs there; None for anything else
    that was looked at on the way."""
    for branch in run.tips:
        yield branch if branch.active and branch.claim is not None and branch.claim.tip[1] >= offset else None
    waiting: list[Run] = []
    for child in run.children.values():
        yield None
        if child.offset >= offset:
            waiting.append(child)
    while waiting:
        below = waiting.pop()
        yield from (branch if branch.active else None for branch in below.tips)
        for child in below.children.values():
            yield None
            waiting.append(child)
