"""One edge of the prefix tree: a chain of blocks that only grows at its end, and what is known about it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from schemas.directory import AbsenceReason
from schemas.kv import Tier
from schemas.phase import Phase
from services.directory.core import spans as sets
from services.directory.core.spans import Spans

if TYPE_CHECKING:
    from services.directory.core.branch import Branch
    from services.directory.core.match import Sight

TOGGLED_BYTES = 16_384
PREFILL, DECODE = Phase.PREFILL, Phase.DECODE
Keys = memoryview
"""Short keys in chain order: a memoryview of format "Q"."""


def keys_view(packed: bytes) -> Keys:
    """The packed little-endian keys of a message as integers, without a copy."""
    return memoryview(packed).cast("Q")


class Holding:
    """What one tier of one node holds in one of its lives. Only a live one is seen; a dead one waits to be swept.

    `blocks` counts blocks held, `digest` is the exclusive or of their keys; for L2 `referenced` counts those of them
    with a claim and `unreachable` those that no prefix in the cluster leads to. `ended`: why a dead one holds nothing.
    """

    __slots__ = (
        "_digest", "_toggled", "_toggled_bytes", "blocks", "ended", "live", "node", "referenced", "runs", "tier",
        "unreachable",
    )  # fmt: skip

    def __init__(self, node: str, tier: Tier, live: bool) -> None:
        self.node = node
        self.tier = tier
        self.live = live
        self.ended: AbsenceReason | None = None
        self.blocks = 0
        self.referenced = 0
        self.unreachable = 0
        self.runs: set[Run] = set()
        self._digest = 0
        self._toggled: list[bytes] = []
        self._toggled_bytes = 0

    @property
    def digest(self) -> int:
        self._digest ^= int(np.bitwise_xor.reduce(np.frombuffer(b"".join(self._toggled), np.uint64)))
        self._toggled, self._toggled_bytes = [], 0
        return self._digest

    def toggle(self, packed: bytes) -> None:
        """These keys came or left: the digest, which is seldom asked for, is brought up to date by and by."""
        self._toggled.append(packed)
        self._toggled_bytes += len(packed)
        if self._toggled_bytes > TOGGLED_BYTES:
            self._digest = self.digest


class Ends:
    """A multiset of prefix lengths: each element `end` covers offsets [0, end) of a run; `top` is the largest."""

    __slots__ = ("counts", "top")

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.top = 0

    def add(self, end: int, times: int = 1) -> None:
        self.counts[end] = self.counts.get(end, 0) + times
        self.top = max(self.top, end)

    def remove(self, end: int) -> None:
        """Take one `end` out; KeyError when there is none."""
        left = self.counts[end] - 1
        if left:
            self.counts[end] = left
            return
        del self.counts[end]
        if end == self.top:
            self.top = max(self.counts, default=0)

    def move(self, end: int, to: int) -> None:
        """One `end` becomes `to`; KeyError when there is none."""
        self.add(to)
        self.remove(end)

    def over(self, offset: int) -> int:
        """How many elements cover `offset`."""
        return sum(times for end, times in self.counts.items() if end > offset)

    def total(self) -> int:
        return sum(self.counts.values())


class Run:
    """Blocks [0, len(keys)) of a chain. A run never splits: what leaves its path hangs below it as a run of its own.

    `parent`, `offset`: this run follows block offset-1 of its parent; an orphan has no parent yet, `orphan_of` is the
    key it waits for. `held`: where blocks lie, per holding. `claims`: contexts are paths from the root, so a claim
    covers a prefix of each run it passes; per (node, phase) the ends of those prefixes. `kept`: prefill claims of a
    branch that lie on another node than its prefill node (see references.py). `tips`: branches whose claim ends here.
    `children`: by first key; `forks`: their offsets. `idle`: blocks at the end that nothing needs. `reach`: blocks
    [0, reach) are reachable: copies in the cluster cover them and all that lead to them. `sights`: what is seen of the
    first `used` blocks (match.py); `seen`: the largest of these numbers; `parted`: where
    the last context that was looked up left the run. `gone`: what the last copies of blocks came to (absence.py).
    """

    __slots__ = (
        "children", "claims", "forks", "gone", "held", "ident", "idle", "kept", "keys", "offset", "orphan_of", "parent",
        "parted", "reach", "seen", "sights", "tips",
    )  # fmt: skip

    def __init__(self, ident: int, parent: Run | None, offset: int, keys: Keys, orphan_of: int | None = None) -> None:
        self.ident = ident
        self.parent = parent
        self.offset = offset
        self.orphan_of = orphan_of
        self.keys = array("Q")
        self.keys.frombytes(keys.tobytes())
        self.children: dict[int, Run] = {}
        self.forks = Ends()
        self.held: dict[Holding, Spans] = {}
        self.claims: dict[tuple[str, Phase], Ends] = {}
        self.kept: dict[tuple[Branch, str], Spans] = {}
        self.tips: dict[Branch, None] = {}
        self.gone: dict[AbsenceReason, Spans] | None = None
        self.idle = 0
        self.reach = 0
        self.sights: dict[int, Sight] | None = None
        self.seen = 0
        self.parted = 0

    def forget_sights(self, first: int) -> None:
        """A copy of block `first` or of one behind it came or went."""
        if self.sights is not None:
            self.sights = {used: sight for used, sight in self.sights.items() if used <= first} or None
            self.seen = max(self.sights, default=0) if self.sights is not None else 0

    def common(self, position: int, keys: Keys, done: int) -> int:
        """How many keys from keys[done] on stand here from `position` on. Keys are chained: an equal key proves all
        blocks before it, so the end of the common part is found by bisection."""
        mine = self.keys
        most = min(len(mine) - position, len(keys) - done)
        if most <= 0 or mine[position] != keys[done]:
            return 0
        if mine[position + most - 1] == keys[done + most - 1]:
            return most
        low, high = 1, most - 1
        while low < high:
            middle = (low + high + 1) // 2
            if mine[position + middle - 1] == keys[done + middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low

    def index_of(self, key: int) -> int | None:
        """The offset of `key`, or None."""
        found = np.flatnonzero(np.frombuffer(self.keys, dtype=np.uint64) == np.uint64(key))
        return int(found[0]) if len(found) else None

    def before(self, first: int) -> int | None:
        """The key of the block before offset `first`; None at the start of a context."""
        if first:
            return self.keys[first - 1]
        return self.parent.keys[self.offset - 1] if self.parent is not None and self.offset else self.orphan_of

    def packed(self, first: int, last: int) -> bytes:
        """Keys of [first, last) as the wire carries them."""
        return self.keys[first:last].tobytes()

    def of(self, blocks: Spans) -> bytes:
        """Keys of these blocks as the wire carries them."""
        if len(blocks) == 2:
            return self.packed(blocks[0], blocks[1])
        return b"".join([self.packed(blocks[i], blocks[i + 1]) for i in range(0, len(blocks), 2)])

    def referenced(self, node: str) -> Spans:
        """Offsets with at least one claim on `node`, copies or not."""
        prefill, decode = self.claims.get((node, PREFILL)), self.claims.get((node, DECODE))
        top = max(prefill.top if prefill is not None else 0, decode.top if decode is not None else 0)
        prefix = [0, top] if top else []
        if not self.kept:
            return prefix
        for (_, place), kept in self.kept.items():
            if place == node:
                for i in range(0, len(kept), 2):
                    sets.add(prefix, kept[i], kept[i + 1])
        return prefix

    def needed(self) -> int:
        """Blocks from the start of the run that something holds, claims or hangs from."""
        needed, most = self.forks.top, len(self.keys)
        for spans in self.held.values():
            if spans[-1] > needed:
                needed = spans[-1]
                if needed == most:
                    return most
        for ends in self.claims.values():
            if ends.top > needed:
                needed = ends.top
        for spans in self.kept.values():
            if spans[-1] > needed:
                needed = spans[-1]
        return needed


Tip = tuple[Run, int]
"""The end of a context: blocks [0, end) of the run and all that lead to it; end >= 1."""


def path(tip: Tip) -> Iterator[Tip]:
    """The runs of a context from its end upwards, each with the length of the prefix that belongs to it."""
    run: Run | None
    run, end = tip
    while run is not None and run.keys:
        yield run, end
        end, run = run.offset, run.parent


def key_from_end(tip: Tip, back: int) -> int | None:
    """The key `back` blocks before the last one of a context; None beyond its known start."""
    for run, end in path(tip):
        if back < end:
            return run.keys[end - 1 - back]
        back -= end
    return None


def depth(tip: Tip) -> int | None:
    """How many blocks a context has; None below an orphan, whose start is unknown."""
    blocks = 0
    for run, end in path(tip):
        if run.orphan_of is not None:
            return None
        blocks += end
    return blocks
