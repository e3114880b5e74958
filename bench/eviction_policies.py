"""The orders of eviction that are compared. All keep the pool's own rules: what is held stays, suffixes go first.

`ours` and `count-then-lru` are the product's own order, with and without what the directory says of values; `lru` is
the same order without the directory. The others are the published rules, each in the place of that order.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from bench.eviction_sequence import NEVER, Access
from services.kvpool.core.eviction import EvictionOrder

PREFILL_S = (34e-6, 0.235e-9)
"""c1 and c2 of GLM-5.2: seconds a token, seconds a query-key pair."""
TTL_HISTORY = 100
TTL_FIRST_S = 2.0
TAIL_BUDGET_TOKENS = 16_384
"""What GLM-5.2 computes in 1 s behind 100,000 tokens: Tail-LRU's threshold."""
TAIL_NEXT_TOKENS = 2_048
"""New tokens of a next prompt; their mean in the Claude Code traces is 1,767."""


class Rival(EvictionOrder):
    """An order told of every request: the slots of the blocks it reads (`began`), and of its context (`ended`)."""

    def began(self, access: Access, slots: list[int], next_use: list[int]) -> None:
        """A request holds these blocks."""

    def ended(self, access: Access, slots: list[int], next_use: list[int]) -> None:
        """Its context is here and no longer held."""

    def advance(self, now_s: float) -> None:
        """Time went on."""

    def moved(self, slots: list[int]) -> None:
        """The keys of these blocks changed."""
        self._offer_leaves(np.array(slots, np.intp))


class Lfu(Rival):
    """Fewest uses since the block came; then the longest unused."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self._uses: list[int] = [0] * slots

    def add(self, slot: int, parent: int | None, depth: int, now_s: float) -> None:
        self._uses[slot] = 0
        super().add(slot, parent, depth, now_s)

    def began(self, access: Access, slots: list[int], next_use: list[int]) -> None:
        for slot in slots:
            self._uses[slot] += 1

    def key(self, slot: int) -> tuple[int, int, float, int, int]:
        return self._uses[slot], 0, self.last_used_s[slot], -self.depth[slot], slot


class Oracle(Rival):
    """Belady on blocks: what is read again last goes first."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self._next: list[int] = [NEVER] * slots

    def began(self, access: Access, slots: list[int], next_use: list[int]) -> None:
        for slot, use in zip(slots, next_use, strict=True):
            self._next[slot] = use

    def ended(self, access: Access, slots: list[int], next_use: list[int]) -> None:
        self.began(access, slots, next_use)
        self.moved(slots)

    def key(self, slot: int) -> tuple[int, int, float, int, int]:
        return -self._next[slot], 0, 0.0, -self.depth[slot], slot


class Ttl(Rival):
    """Continuum: at the end of a turn its context is pinned for tau = argmax P(wait <= tau) * gain - tau over the waits
    seen, gain being the time to compute the context again (no queue here to wait in). Under pressure the pin that ends
    first goes first. Waits count per way the answer ended; with few of them those of all."""

    def __init__(self, slots: int, tokens_per_block: int) -> None:
        super().__init__(slots)
        self._block = tokens_per_block
        self._until_s = [0.0] * slots
        self._ends: list[tuple[float, list[int]]] = []
        self._since: dict[str, tuple[float, str]] = {}
        self._waits: dict[str, list[float]] = defaultdict(list)

    def add(self, slot: int, parent: int | None, depth: int, now_s: float) -> None:
        self._until_s[slot] = 0.0
        super().add(slot, parent, depth, now_s)

    def began(self, access: Access, slots: list[int], next_use: list[int]) -> None:
        since_s, finish = self._since.pop(access.branch, (None, ""))
        if since_s is not None:
            for kind in ("", finish) if finish else ("",):
                self._waits[kind] = [*self._waits[kind][-4 * TTL_HISTORY :], access.at_s - since_s]
        for slot in slots:
            self._until_s[slot] = 0.0

    def ended(self, access: Access, slots: list[int], next_use: list[int]) -> None:
        if access.row.end:
            return
        self._since[access.branch] = access.at_s, access.finish
        until_s = access.at_s + self._ttl_s(access.finish, len(access.blocks) * self._block)
        for slot in slots:
            self._until_s[slot] = max(self._until_s[slot], until_s)
        heapq.heappush(self._ends, (until_s, slots))
        self.moved(slots)

    def advance(self, now_s: float) -> None:
        while self._ends and self._ends[0][0] <= now_s:
            until_s, slots = heapq.heappop(self._ends)
            over = [slot for slot in slots if self._until_s[slot] == until_s]
            for slot in over:
                self._until_s[slot] = 0.0
            self.moved(over)

    def _ttl_s(self, finish: str, tokens: int) -> float:
        waits = self._waits[""]
        if len(waits) <= TTL_HISTORY:
            return TTL_FIRST_S
        waits = sorted(self._waits[finish] if len(self._waits[finish]) > TTL_HISTORY else waits)
        gain_s = PREFILL_S[0] * tokens + PREFILL_S[1] * tokens * (tokens + 1) / 2
        gains = [(gain_s * number / len(waits) - wait_s, wait_s) for number, wait_s in enumerate(waits, 1)]
        best, tau_s = max(gains)
        return tau_s if best > 0.0 else 0.0

    def key(self, slot: int) -> tuple[int, int, float, int, int]:
        until_s = self._until_s[slot]
        if until_s:
            return 1, 0, until_s, -self.depth[slot], slot
        return 0, 0, self.last_used_s[slot], -self.depth[slot], slot


class TailLru(Rival):
    """Tail-LRU: of a conversation of L tokens only the first L + Q - budget must stay for the next prefill to keep its
    time; what lies behind goes before everything else, then the longest unused."""

    def __init__(self, slots: int, tokens_per_block: int) -> None:
        super().__init__(slots)
        self._spare = (TAIL_BUDGET_TOKENS - TAIL_NEXT_TOKENS) // tokens_per_block
        self._needed = [0] * slots

    def ended(self, access: Access, slots: list[int], next_use: list[int]) -> None:
        first = max(0, len(access.blocks) - self._spare)
        for slot in slots:
            self._needed[slot] = self.depth[slot] < first
        self.moved(slots)

    def key(self, slot: int) -> tuple[int, int, float, int, int]:
        return self._needed[slot], 0, self.last_used_s[slot], -self.depth[slot], slot


Policy = tuple[bool, bool, Callable[[int, int], Rival | None]]
POLICIES: dict[str, Policy] = {
    "ours": (True, True, lambda slots, block: None),
    "count-then-lru": (True, False, lambda slots, block: None),
    "lru": (False, False, lambda slots, block: None),
    "lfu": (False, False, lambda slots, block: Lfu(slots)),
    "ttl": (False, False, Ttl),
    "tail-lru": (False, False, TailLru),
    "oracle": (False, False, lambda slots, block: Oracle(slots)),
}
"""By name: whether the directory speaks to the pool, whether it speaks of values, and the order in place of the pool's
own (slots, tokens per block)."""
