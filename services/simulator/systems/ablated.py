"""Parts of the product on a fixed split of plain SGLang, each alone or together: what an ablation compares.

The base is `static` (gateway `cache_aware`, round robin, HiCache per node with a copy per rank, LRU, load at start). A
part puts ours in its place: `pool` one host-memory pool of all nodes, one copy a node, both phases write, and the first
token leaves from the prefill node; `fetch` brings a prefix while its request waits; `eviction` takes what no active
branch references first; `routing` places prefill and decode by prediction; `planner` orders splits.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from schemas.directory import MatchReply
from schemas.phase import Phase
from services.router.core.roster import Mask
from services.simulator.call import Call
from services.simulator.system import Load, Traits
from services.simulator.systems.own import Own, OwnSettings
from services.simulator.systems.static import CacheAware

PARTS = ("pool", "fetch", "eviction", "routing", "planner")


def name_of(parts: Sequence[str]) -> str:
    """The id of the base with these parts."""
    return "+".join(("plain", *parts))


class Ablated(Own):
    """The base with `parts` of the product."""

    def __init__(self, parts: Sequence[str]) -> None:
        self.parts = frozenset(parts)
        pooled = "pool" in self.parts
        super().__init__(
            OwnSettings(planner="planner" in self.parts, decode_in_turn="routing" not in self.parts),
            id=name_of(parts),
            traits=Traits(
                shared_pool=pooled,
                counted="eviction" in self.parts,
                load=Load.WAITING if "fetch" in self.parts else Load.AT_START,
                writes_output=pooled,
                host_copies=1 if pooled else 4,
                token_after_transfer=not pooled,
            ),
        )
        self._cache_aware = CacheAware()

    def _match(self, call: Call, now: float) -> MatchReply:
        """Without the pool only a node's own memory is within its reach."""
        match = super()._match(call, now)
        return match if "pool" in self.parts else msgspec.structs.replace(match, pieces=[])

    def _prefill_rows(self, call: Call, now: float) -> Mask:
        rows = super()._prefill_rows(call, now)
        if "routing" in self.parts:
            return rows
        chosen = self._cache_aware.choose(call, self.cluster.serving(Phase.PREFILL))
        only: Mask = np.array([name == chosen for name in self._placer.roster.names])
        return only


CUMULATIVE = tuple(PARTS[:count] for count in range(1, len(PARTS) + 1))
ALONE = tuple((part,) for part in PARTS[1:])
NO_FETCH = ("pool", "eviction", "routing")
