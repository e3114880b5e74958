"""One branch: what it claims, what its last prompt was, and what the directory needs to judge its next request."""

from __future__ import annotations

from typing import NamedTuple

from schemas.branch import BranchKind, BranchState
from services.directory.core.run import Run, Tip

BranchKey = tuple[str, str]
"""(tenant, id): ids are unique within a tenant only."""


class Claim(NamedTuple):
    """An active branch claims every block up to `tip` on its prefill node and on its decode node (None: not yet).
    One that ended with its parent may have its claim a moment longer (References.leaving)."""

    tip: Tip
    prefill: str | None
    decode: str | None


class Anchor(NamedTuple):
    """What a later prompt must contain to extend a prompt of `blocks` blocks: `key` as its block `number`."""

    blocks: int
    number: int
    key: int


class Branch:
    """`fresh`: its next request defines the context, whatever it shares with the last one. `departed`: anchors of
    contexts that did not extend the branch when they came. `kept`: runs on which a prefill claim of the branch lies on
    another node than its prefill node. `life`: how often it has ended. `seen`: its last activity (monotonic seconds).
    `family`: the session id it shares with others, within which its lineage is inferred. `grown`: a request extended
    its context. `compacting`: a request asked for the summary that is to replace it. `first_blocks`: of its first
    prompt. For inferred ones: `left`: a later branch left its path since its last use; `unsettled`: it left its
    parent's after `shared_blocks`, and what it is to the parent is not known yet; `heir`: the last one that left it.
    `parent_seen`: when the parent was last active before that. `began_blocks`: of the first prompt of the branch that
    all this goes back to. `asked`: the last request that was taken to extend it. `confirmed`: how many did.
    `number`: its place among all branches. `with_descendants`: whether its end, if it has ended, was theirs too.
    """

    __slots__ = (
        "anchor", "asked", "began_blocks", "blocks", "claim", "compacting", "confirmed", "decode", "departed",
        "family", "first_blocks", "fresh", "grown", "heir", "inferred", "kept", "key", "kind", "left", "life", "number",
        "parent", "parent_seen", "prefill", "seen", "shared_blocks", "state", "unsettled", "version",
        "with_descendants",
    )  # fmt: skip

    def __init__(self, key: BranchKey, now: float) -> None:
        self.key = key
        self.number = 0
        self.parent: BranchKey | None = None
        self.kind = BranchKind.MAIN
        self.state = BranchState.ACTIVE
        self.version = 0
        self.life = 0
        self.with_descendants = False
        self.family: str | None = None
        self.inferred = False
        self.fresh = True
        self.grown = False
        self.compacting = False
        self.confirmed = 0
        self.left = False
        self.heir: Branch | None = None
        self.parent_seen: float | None = None
        self.began_blocks = 0
        self.asked: str | None = None
        self.unsettled = False
        self.first_blocks = 0
        self.shared_blocks = 0
        self.seen = now
        self.blocks = 0
        self.claim: Claim | None = None
        self.kept: set[Run] = set()
        self.anchor: Anchor | None = None
        self.departed: list[Anchor] = []
        self.prefill: str | None = None
        self.decode: str | None = None

    @property
    def active(self) -> bool:
        return self.state is BranchState.ACTIVE

    @property
    def confidence(self) -> float:
        """How sure it is that its requests are one branch: 1 when they say so; else the chance that the next one taken
        for its own is, after as many that extended it (Laplace's rule of succession), and a half while it is open what
        the branch is to the one it left."""
        if not self.inferred:
            return 1.0
        return 0.5 if self.unsettled else (self.confirmed + 1) / (self.confirmed + 2)
