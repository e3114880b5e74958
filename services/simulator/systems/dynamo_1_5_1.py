"""Dynamo 1.5.1 as the reference ran it: its planner, Model Gateway in front, HiCache with LRU per node.

Planner and budget: `dynamo_planner` (1.5.1's clamp). Routing: the gateway's `cache_aware` for prefill, round robin for
decode, as in `static`. A switch restarts the worker: 666 to 831 s out of service (the means that the reference
measured), its device and host KV lost. Approximate: a restart's length is drawn uniformly from that range.
"""

from collections.abc import Sequence

from schemas.phase import Phase
from services.simulator.call import Call
from services.simulator.system import Action, Place
from services.simulator.systems.dynamo_kv_router import DynamoKvRouter
from services.simulator.systems.static import CacheAware, RoundRobin


class Dynamo151(DynamoKvRouter):
    """The planner with the gateway's routing."""

    id = "dynamo-1.5.1"

    def __init__(self) -> None:
        super().__init__()
        self.cache_aware, self.in_turn = CacheAware(), RoundRobin()

    def arrived(self, call: Call, now: float) -> Sequence[Action]:
        prefill, decode = self.cluster.serving(Phase.PREFILL), self.cluster.serving(Phase.DECODE)
        if not prefill or not decode:
            self._held[call.id] = call
            return ()
        return (Place(call, self.cache_aware.choose(call, prefill), self.in_turn.choose(decode)),)

    def moved(self, node: str, now: float) -> Sequence[Action]:
        self.cache_aware.forget(node)
        return super().moved(node, now)
