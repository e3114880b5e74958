"""Plain SGLang with prefill-decode disaggregation behind Model Gateway: a fixed split.

Rules: gateway `cache_aware` for prefill (threshold 0.3, absolute 64, relative 1.5: lightseekorg/smg
policies/cache_aware.rs), round robin for decode; HiCache with LRU per node, one copy per tensor-parallel rank, loaded
when prefill starts; no KV kept by decode nodes (sglang 0.5.23 defaults). Approximate: the gateway's tree per worker is
what was sent to it and is not cut within a run.
"""

from array import array
from collections.abc import Sequence

from schemas.phase import Phase
from services.simulator.call import Call
from services.simulator.passive import Passive
from services.simulator.system import Action, NodeView, Place, Traits

THRESHOLD, ABSOLUTE, RELATIVE = 0.3, 64, 1.5


class CacheAware:
    """Model Gateway's `cache_aware`: the longest match unless in-flight counts are out of balance.

    `_sent`: per key, which nodes have been sent it, as bits.
    """

    def __init__(self) -> None:
        self._sent: list[int] = []
        self._bit: dict[str, int] = {}
        self._bits = 0

    def choose(self, call: Call, nodes: Sequence[NodeView]) -> str:
        """The node for a call, which counts as sent there."""
        loads = [len(node.prefill_calls) for node in nodes]
        least, most = min(loads), max(loads)
        chosen = nodes[loads.index(least)]
        if not (most - least > ABSOLUTE and most > RELATIVE * least):
            blocks, bits = self._match(call.keys, sum(self._bit_of(node.name) for node in nodes))
            if blocks > THRESHOLD * len(call.keys):
                there = [node for node in nodes if self._bit_of(node.name) & bits]
                chosen = min(there, key=lambda node: len(node.prefill_calls))
        self._insert(call.keys, self._bit_of(chosen.name))
        return chosen.name

    def forget(self, node: str) -> None:
        """The worker is gone, and its tree with it."""
        self._bit.pop(node, None)

    def _bit_of(self, node: str) -> int:
        if node not in self._bit:
            self._bit[node] = 1 << self._bits
            self._bits += 1
        return self._bit[node]

    def _match(self, keys: "array[int]", nodes: int) -> tuple[int, int]:
        """(leading blocks that some of `nodes` were sent, which of them)."""
        low, high, sent = 0, len(keys), self._sent
        while low < high:
            middle = (low + high + 1) // 2
            key = keys[middle - 1]
            if key < len(sent) and sent[key] & nodes:
                low = middle
            else:
                high = middle - 1
        return low, sent[keys[low - 1]] & nodes if low else 0

    def _insert(self, keys: "array[int]", bit: int) -> None:
        sent = self._sent
        for key in reversed(keys):
            if key >= len(sent):
                sent.extend([0] * (key + (1 << 16) - len(sent)))
            if sent[key] & bit:
                break
            sent[key] |= bit


class RoundRobin:
    """Nodes in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, nodes: Sequence[NodeView]) -> str:
        self._turn += 1
        return nodes[self._turn % len(nodes)].name


class Static(Passive):
    """A fixed split of plain SGLang."""

    id = "static"
    traits = Traits(token_after_transfer=True, host_copies=4)

    def __init__(self) -> None:
        self.prefill, self.decode = CacheAware(), RoundRobin()

    def arrived(self, call: Call, now: float) -> Sequence[Action]:
        prefill, decode = self.cluster.serving(Phase.PREFILL), self.cluster.serving(Phase.DECODE)
        if not prefill or not decode:
            return ()
        return (Place(call, self.prefill.choose(call, prefill), self.decode.choose(decode)),)
