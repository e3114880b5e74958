"""Model Gateway's `cache_aware` fed by the engines' KV events, on a fixed split of plain SGLang nodes.

Rule: lightseekorg/smg policies/cache_aware.rs, type 1 (event driven), gateway defaults absolute 64 and relative 1.5:
out of balance, (max - min) > 64 and max > 1.5 min requests in flight: the fewest in flight; else the worker that holds
most of the prompt, ties to the fewest in flight, then to the smaller tree; no overlap: the fewest in flight. The type
without events, which the reference ran (a tree of what was sent where, threshold 0.3), is `static`'s routing. Decode
round robin. Approximate: events are never late; a block counts on either tier of its worker.
"""

from collections.abc import Sequence

from schemas.phase import Phase
from services.simulator.call import Call
from services.simulator.passive import Passive
from services.simulator.system import Action, NodeView, Place
from services.simulator.systems.static import ABSOLUTE, RELATIVE, RoundRobin, Static


def choose(call: Call, nodes: Sequence[NodeView]) -> str:
    """The prefill worker for a call."""
    loads = {node.name: len(node.prefill_calls) for node in nodes}
    least, most = min(loads.values()), max(loads.values())
    overlap = {node.name: 0 for node in nodes}
    if not (most - least > ABSOLUTE and most > RELATIVE * least):
        overlap = {node.name: node.cached_blocks(call)[1] for node in nodes}
    return min(nodes, key=lambda node: (-overlap[node.name], loads[node.name], node.l2_used_tokens)).name


class SmgCacheAware(Passive):
    """A fixed split behind the gateway."""

    id = "smg-cache-aware"
    traits = Static.traits

    def __init__(self) -> None:
        self.decode = RoundRobin()

    def arrived(self, call: Call, now: float) -> Sequence[Action]:
        prefill, decode = self.cluster.serving(Phase.PREFILL), self.cluster.serving(Phase.DECODE)
        return (Place(call, choose(call, prefill), self.decode.choose(decode)),)
