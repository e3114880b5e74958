"""Dynamo's KV router: the cheapest worker in blocks.

Rule: lib/kv-router/src/scheduling/selector (ai-dynamo at 07a6c9ce), defaults of kv_router_args.py in the 1.6.1 wheel:
cost = max(0, raw prefill blocks - credit) + decode blocks; raw prefill blocks = (active prefill tokens of the worker +
the whole prompt) / block; credit = 1.0 device + 0.75 host (beyond the device) + a multiplier x shared blocks beyond
the device (off by default). Smallest cost, ties at random. The prefill router does not track decode blocks, the
decode router no prefill and no overlap: pure load. A booked prompt counts what is not credited until its prefill ends.

Approximate: decode blocks are prompts' blocks, each request's own (the router counts shared ones once).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.simulator.call import Call
from services.simulator.system import Cluster, NodeView

HOST_CREDIT, SHARED_CREDIT = 0.75, 0.5


@dataclass(frozen=True, slots=True)
class Overlap:
    """Leading blocks of a prompt: on a worker's device, in its host memory beyond those, in a tier shared by all."""

    device: int = 0
    host: int = 0
    shared: int = 0

    @property
    def credit(self) -> float:
        """Blocks that are not charged."""
        return self.device + HOST_CREDIT * self.host + SHARED_CREDIT * max(0, self.shared - self.device)


def prefill_cost(prompt_tokens: int, active_tokens: float, overlap: Overlap, block_tokens: int) -> float:
    """Cost of a prefill worker in blocks."""
    return max(0.0, (active_tokens + prompt_tokens) / block_tokens - overlap.credit)


@dataclass(slots=True)
class KvRouter:
    """`booked`: per request in prefill, (its worker, the tokens it was not credited)."""

    booked: dict[str, tuple[str, float]] = field(default_factory=dict)

    def prefill(self, call: Call, nodes: Sequence[NodeView], cluster: Cluster, shared: int = 0) -> str:
        """The prefill worker for a call, which is booked there. `shared`: leading blocks that a shared tier holds."""
        active: dict[str, float] = {}
        for worker, tokens in self.booked.values():
            active[worker] = active.get(worker, 0.0) + tokens
        block = cluster.block_tokens
        costs: dict[str, float] = {}
        uncredited: dict[str, float] = {}
        for node in nodes:
            device, both = node.cached_blocks(call)
            overlap = Overlap(device, both - device, shared)
            costs[node.name] = prefill_cost(call.prompt_tokens, active.get(node.name, 0.0), overlap, block)
            uncredited[node.name] = max(0.0, call.prompt_tokens - block * overlap.credit)
        chosen = cheapest(costs, cluster)
        self.booked[call.id] = chosen, uncredited[chosen]
        return chosen

    def decode(self, nodes: Sequence[NodeView], cluster: Cluster) -> str:
        """The decode worker with the fewest blocks of requests."""
        block = cluster.block_tokens
        return cheapest(
            {node.name: sum(-(-call.prompt_tokens // block) for call in node.decode_calls.values()) for node in nodes},
            cluster,
        )

    def prefilled(self, call: Call) -> None:
        """Its prefill is over, or was given back."""
        self.booked.pop(call.id, None)


def cheapest(costs: Mapping[str, float], cluster: Cluster) -> str:
    """A worker of the smallest cost, ties at random."""
    least = min(costs.values())
    best = [name for name, cost in costs.items() if cost == least]
    return best[0] if len(best) == 1 else best[int(cluster.draw() * len(best))]
