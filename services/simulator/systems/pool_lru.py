"""One host-memory pool with LRU, loaded when prefill starts, behind Dynamo's KV router, on a fixed split.

This is the pool alone, without what makes ours pay: the reference measured "Dynamo KV router with a shared pool loaded
at prefill start" (P95 TTFT 95 s, mean E2E 38 s on Claude Code). Routing: `dynamo_router` with its shared-cache credit
(0.5 a block beyond the device; `shared_cache_multiplier`); blocks that the node lacks come from peers' host memory when
prefill starts, so the device waits. Nodes write prompts and answers; nothing is counted, eviction is LRU per node.
"""

from array import array
from collections.abc import Sequence

from schemas.phase import Phase
from services.simulator.call import Call
from services.simulator.passive import Passive
from services.simulator.system import Action, Place, Traits
from services.simulator.systems.dynamo_router import KvRouter
from services.simulator.systems.pool_index import PoolIndex


class PoolLru(Passive):
    """A fixed split."""

    id = "pool-lru"
    traits = Traits(shared_pool=True, writes_output=True)

    def __init__(self) -> None:
        self.router = KvRouter()
        self.index = PoolIndex()

    def arrived(self, call: Call, now: float) -> Sequence[Action]:
        prefill, decode = self.cluster.serving(Phase.PREFILL), self.cluster.serving(Phase.DECODE)
        self.router.prefilled(call)
        limit = (call.prompt_tokens - 1) // self.cluster.block_tokens
        shared = self.index.leading(call.keys, limit)
        chosen = self.router.prefill(call, prefill, self.cluster, shared)
        own = self.cluster.nodes[chosen].cached_blocks(call)[1]
        plan = self.index.sources(call.keys, own, shared, chosen) if own < shared else ()
        return (Place(call, chosen, self.router.decode(decode, self.cluster), plan),)

    def prefilled(self, call: Call, now: float) -> Sequence[Action]:
        self.router.prefilled(call)
        return ()

    def stored(self, node: str, tier: str, parent: int | None, keys: "bytes | array[int]", now: float) -> None:
        self.index.stored(node, keys)

    def removed(self, node: str, tier: str, parent: int | None, keys: "bytes | array[int]", now: float) -> None:
        self.index.removed(node, keys)

    def cleared(self, node: str, tier: str, now: float) -> None:
        self.index.cleared(node)
