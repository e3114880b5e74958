"""Mooncake's Conductor: the instance with the shortest predicted time to first token, transfers included (Algorithm 1).

Rule: "Mooncake" (FAST'25), Algorithm 1. Per prefill instance: if best prefix / own prefix is above a threshold, fetch
the difference from the instance that has the best: TTFT = T_transfer + T_queue + T_prefill(prompt, best prefix); else
TTFT = T_queue + T_prefill(prompt, own prefix). Smallest TTFT; the fetched KV stays there as a replica. Decode: the
instance with the shortest predicted time between tokens. Offline profiles: the engines' own coefficients. Fixed split;
host memory is one pool with LRU; decode instances write their answers to it; a prefix is fetched when prefill starts.

Approximate: the best prefix is what all instances hold together, not what one of them does. The paper sets the
threshold by hand and does not say to what; `THRESHOLD` here. No objectives, hence no rejections (429). T_queue adds the
whole prefill time of every request there whose prefill has not ended. LRU instead of evicting 5 % at 90 % full; no
leases or pins.
"""

from array import array
from collections.abc import Sequence

from schemas.phase import Phase
from services.engine.core.timing import DecodeTerms, PrefillTerms, attention_pairs
from services.simulator.call import Call
from services.simulator.passive import Passive
from services.simulator.system import Action, NodeView, Place, Traits
from services.simulator.systems.pool_index import PoolIndex
from services.simulator.systems.signals import decode_kv_tokens

THRESHOLD = 1.2


class Mooncake(Passive):
    """`_queued`: per request in prefill (its instance, its predicted prefill time)."""

    id = "mooncake"
    traits = Traits(shared_pool=True, writes_output=True)

    def __init__(self, threshold: float = THRESHOLD) -> None:
        self.threshold = threshold
        self.index = PoolIndex()
        self._queued: dict[str, tuple[str, float]] = {}

    def arrived(self, call: Call, now: float) -> Sequence[Action]:
        self._queued.pop(call.id, None)
        block = self.cluster.block_tokens
        limit = (call.prompt_tokens - 1) // block
        best = self.index.leading(call.keys, limit)
        queue: dict[str, float] = {}
        for name, seconds in self._queued.values():
            queue[name] = queue.get(name, 0.0) + seconds
        offers: list[tuple[float, float, str, int]] = []
        for node in self.cluster.serving(Phase.PREFILL):
            own = node.cached_blocks(call)[1]
            fetched = best - own if best > self.threshold * own else 0
            prefill_s = self._prefill_s(call, (own + fetched) * block)
            transfer_s = self.cluster.hardware.fetch_s(fetched * block)
            ttft_s = transfer_s + queue.get(node.name, 0.0) + prefill_s
            offers.append((ttft_s, prefill_s, node.name, own if fetched else best))
        ttft_s, prefill_s, chosen, own = min(offers)
        plan = self.index.sources(call.keys, own, best, chosen) if own < best else ()
        self._queued[call.id] = chosen, prefill_s
        decode = min(self.cluster.serving(Phase.DECODE), key=lambda node: self._between_tokens_s(node, call))
        return (Place(call, chosen, decode.name, plan, ttft_s),)

    def _prefill_s(self, call: Call, cached_tokens: int) -> float:
        uncached = call.prompt_tokens - cached_tokens
        terms = PrefillTerms(1, uncached, attention_pairs(uncached, cached_tokens), cached_tokens, call.media)
        return self.cluster.times.prefill_s(terms)

    def _between_tokens_s(self, node: NodeView, call: Call) -> float:
        context = decode_kv_tokens(node) + call.prompt_tokens
        return self.cluster.times.decode_s(DecodeTerms(len(node.decode_calls) + 1, context))

    def prefilled(self, call: Call, now: float) -> Sequence[Action]:
        self._queued.pop(call.id, None)
        return ()

    def stored(self, node: str, tier: str, parent: int | None, keys: "bytes | array[int]", now: float) -> None:
        self.index.stored(node, keys)

    def removed(self, node: str, tier: str, parent: int | None, keys: "bytes | array[int]", now: float) -> None:
        self.index.removed(node, keys)

    def cleared(self, node: str, tier: str, now: float) -> None:
        self.index.cleared(node)
