"""Parts of the product on a fixed split of plain SGLang, each alone or together: what an ablation compares.

The base is `static` (gateway `cache_aware`, round robin, HiCache per node with a copy per rank, LRU, load at start). A
part puts ours in its place: `pool` one host-memory pool of all nodes, one copy a node, both phases write, and the first
token leaves from the prefill node; `fetch` brings a prefix while its request waits; `eviction` takes what no active
branch references first; `routing` places prefill and decode by prediction; `planner` orders splits.
"""

from collections.abc import Sequence

from schemas.phase import Phase
from services.router.core.placement import Prompt, choose_prefill, predict
from services.simulator.call import Call
from services.simulator.system import Action, Load, Place, Traits
from services.simulator.systems.own import Own, OwnSettings
from services.simulator.systems.static import CacheAware

PARTS = ("pool", "fetch", "eviction", "routing", "planner")
START = "4P5D"


def name_of(parts: Sequence[str]) -> str:
    """The id of the base with these parts."""
    return "+".join(("plain", *parts))


class Ablated(Own):
    """The base with `parts` of the product. The planner's initial split is `START`."""

    def __init__(self, parts: Sequence[str]) -> None:
        self.parts = frozenset(parts)
        pooled = "pool" in self.parts
        super().__init__(
            OwnSettings(
                planner="planner" in self.parts, initial_split=START, decode_in_turn="routing" not in self.parts
            ),
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

    def arrived(self, call: Call, now: float) -> Sequence[Action]:
        prefill, decode = self.cluster.serving(Phase.PREFILL), self.cluster.serving(Phase.DECODE)
        if "routing" not in self.parts:
            chosen = self._cache_aware.choose(call, prefill)
            prefill = [node for node in prefill if node.name == chosen]
        match = self.directory.match(call, now)
        self._lineage[call.id] = match.lineage, match.known_blocks * self.cluster.block_tokens
        prompt = Prompt(call.prompt_tokens, self.cluster.block_tokens, match)
        self._turn += 1
        best = choose_prefill(
            [predict(prompt, self._prefill_view(node, now), self._reachable, self._fetch_cost) for node in prefill],
            self._turn,
        )
        sink = self._decode_node(call, best, decode)
        self._book(call, best, sink)
        self.directory.placed(call, best.node, now)
        return (Place(call, best.node, sink, best.fetch, best.ttft_s),)

    def _reachable(self, node: str) -> bool:
        return "pool" in self.parts


CUMULATIVE = tuple(PARTS[:count] for count in range(1, len(PARTS) + 1))
ALONE = tuple((part,) for part in PARTS[1:])
