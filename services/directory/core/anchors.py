"""Inferred branches by what their next prompts must contain: which one a prompt without an id goes on with."""

from __future__ import annotations

from collections.abc import Callable

from services.directory.core.branch import Branch
from services.directory.core.departures import common_blocks
from services.directory.core.run import Keys, Tip


class Anchors:
    """Anchors of inferred branches by family and key; siblings that begin alike may share one."""

    def __init__(self) -> None:
        self._anchors: dict[str | None, dict[int, list[Branch]]] = {}

    def add(self, branch: Branch) -> None:
        """Make an inferred branch findable, within its family, by what its next prompt must contain."""
        if branch.inferred and branch.anchor is not None:
            self._anchors.setdefault(branch.family, {}).setdefault(branch.anchor.key, []).append(branch)

    def remove(self, branch: Branch) -> None:
        """To be called before the anchor of a branch changes."""
        family = self._anchors.get(branch.family)
        if family is None or branch.anchor is None or branch not in (alike := family.get(branch.anchor.key, [])):
            return
        alike.remove(branch)
        if not alike:
            del family[branch.anchor.key]
            if not family:
                del self._anchors[branch.family]

    def extended_by(
        self, tenant: str, family: str | None, keys: Keys, tips: list[Tip], known: int, busy: Callable[[Branch], bool]
    ) -> Branch | None:
        """The inferred branch that a prompt without a branch id extends furthest, by its first `known` keys.

        Siblings that begin alike may have the same anchor: then it is the one whose context the prompt shares most of.
        A branch of one request is extended only by what holds its whole prompt, or is longer than its context: else a
        sibling whose first prompt differs in its last blocks would be taken for it. A branch that is `busy` with a
        request is extended by no other one: agents wait for their answer.
        """
        anchors = self._anchors.get(family)
        if anchors is None or anchors.keys().isdisjoint(keys[:known].tolist()):
            return None
        for number in range(known - 1, -1, -1):
            alike = [
                branch
                for branch in anchors.get(keys[number], ())
                if branch.key[0] == tenant and _goes_on(branch, known, len(keys)) and not busy(branch)
            ]
            if alike:
                return max(alike, key=lambda branch: _likeness(branch, tips))
        return None

    def check(self) -> None:
        """No empty places are kept, and every branch stands under its own anchor."""
        for family, anchors in self._anchors.items():
            assert anchors
            for key, alike in anchors.items():
                assert alike
                assert all(b.family == family and b.anchor is not None and b.anchor.key == key for b in alike)


def _likeness(branch: Branch, tips: list[Tip]) -> tuple[int, int, float]:
    """Less is missing of its last prompt, more of its context is shared, it was used later."""
    shared = common_blocks(branch.claim.tip, tips[-1]) if branch.claim is not None and tips else 0
    missing = branch.anchor.blocks - shared if branch.anchor is not None else 0
    return -max(0, missing), shared, branch.seen


def _goes_on(branch: Branch, known: int, blocks: int) -> bool:
    assert branch.anchor is not None
    return branch.grown or known >= branch.anchor.blocks or blocks > branch.blocks
