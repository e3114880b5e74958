"""Dynamo's planner in its default mode: the load rule and the two budget rules that turn its wishes into moves.

Rules: ai-dynamo 1.5.1 and 1.6.1, dynamo/planner/core/load_scaling.py (`optimization_target="throughput"`,
disaggregated) and budget.py with `min_gpu_budget == max_gpu_budget` = all nodes. Every 5 s, unless a scaling is under
way: one more prefill worker if any queue holds a model's whole context length of prompts, one fewer if all hold less
than a tenth; one more decode worker if any has more KV scheduled and queued than memory, one fewer if all have under
60 %.

Approximate: which worker is removed (the newest here; Kubernetes prefers the youngest pods), and all ranks of a node
report as one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from schemas.phase import Phase
from services.simulator.system import Cluster, Move, NodeView
from services.simulator.systems.signals import decode_kv_tokens, queued_prompt_tokens

INTERVAL_S = 5.0
PREFILL_UP, PREFILL_DOWN = 1.0, 0.1
DECODE_UP, DECODE_DOWN = 1.0, 0.6
CONTEXT_TOKENS = {"glm-5.2": 1_048_576, "kimi-k2.6": 262_144, "glm-4.6-gqa": 202_752, "dynamo-mocker": 262_144}
"""Longest context of the simulated models, which their engines report when no shorter one is configured."""

Split = tuple[int, int]
"""(prefill, decode) workers."""
Budget = Callable[[Split, Split, int], Split]
"""(ready, wished for, nodes) to what is ordered."""


def context_tokens(hardware_name: str) -> int:
    """The context length that the engines of a hardware profile report."""
    return CONTEXT_TOKENS[hardware_name.split("/", 1)[0]]


def prefill_wish(ratios: Sequence[float], ready: int, *, consolidates: bool) -> int:
    """Prefill workers wanted. `ratios`: queued prompt tokens over context length, one per worker."""
    if any(ratio >= PREFILL_UP for ratio in ratios):
        return ready + 1
    if ready > 1 and all(ratio < PREFILL_DOWN for ratio in ratios):
        return _fewer(ratios, ready, PREFILL_UP, consolidates=consolidates)
    return ready


def decode_wish(usages: Sequence[float], ready: int, *, consolidates: bool) -> int:
    """Decode workers wanted. `usages`: KV scheduled and queued over what fits, one per worker."""
    if any(usage > DECODE_UP for usage in usages):
        return ready + 1
    if ready > 1 and all(usage < DECODE_DOWN for usage in usages):
        return _fewer(usages, ready, DECODE_UP, consolidates=consolidates)
    return ready


def _fewer(values: Sequence[float], ready: int, up: float, *, consolidates: bool) -> int:
    """One worker fewer; not (from 1.6.1 on) if the load spread over the rest would ask for it again at once."""
    if consolidates and max(values) * ready / (ready - 1) >= up:
        return ready
    return ready - 1


def clamp_1_5_1(ready: Split, wished: Split, nodes: int) -> Split:
    """1.5.1's `proportional_clamp_pair`: in [nodes - 1, nodes] as wished, else shrunk or grown in proportion.

    Prefill is rounded first and decode takes the rest, so one more decode worker costs a prefill worker while one more
    prefill worker changes nothing.
    """
    prefill, decode = wished
    total = prefill + decode
    if nodes - 1 <= total <= nodes:
        return wished
    if total > nodes:
        prefill = max(1, min(nodes - 1, prefill * nodes // total))
        return prefill, max(1, nodes - prefill)
    prefill = max(1, -(-prefill * nodes // total))
    decode = max(1, nodes - prefill)
    return (prefill, decode) if prefill + decode <= nodes else wished


def guard_1_6_1(ready: Split, wished: Split, nodes: int) -> Split:
    """1.6.1's `guard_disagg_scaling_budget`: at the full budget only an opposing pair moves, everything else holds."""
    total = sum(ready)
    if not nodes - 1 <= total <= nodes:
        return clamp_1_5_1(ready, ready, nodes)
    more = any(after > before for before, after in zip(ready, wished, strict=True))
    fewer = any(after < before for before, after in zip(ready, wished, strict=True))
    if fewer and not more:
        return ready
    if fewer:
        fits = min(wished) >= 1 and nodes - 1 <= sum(wished) <= nodes
        return wished if fits else ready
    if more and total >= nodes:
        return ready
    fitted = clamp_1_5_1(ready, wished, nodes)
    within = all(a <= c <= b for a, b, c in zip(ready, wished, fitted, strict=True))
    return fitted if within and nodes - 1 <= sum(fitted) <= nodes else ready


@dataclass(slots=True)
class DynamoPlanner:
    """The loop: `due` is its next tick; `tick` answers with the moves of one decision, none while one is under way.

    `queued`: prompt tokens that a prefill worker reports as waiting, `decode_kv`: tokens that a decode worker reports
    as scheduled and queued.
    """

    budget: Budget
    consolidates: bool
    due: float = INTERVAL_S
    queued: Callable[[NodeView], int] = queued_prompt_tokens
    decode_kv: Callable[[NodeView], int] = decode_kv_tokens
    _joined: dict[str, float] = field(default_factory=dict)

    def joined(self, node: str, now: float) -> None:
        """The worker of a node is ready."""
        self._joined[node] = now

    def tick(self, cluster: Cluster, now: float) -> list[Move]:
        """Take what is due."""
        self.due = now + INTERVAL_S
        nodes = list(cluster.nodes.values())
        if any(node.moving for node in nodes):
            return []
        prefill, decode = cluster.serving(Phase.PREFILL), cluster.serving(Phase.DECODE)
        context = context_tokens(cluster.hardware.name)
        queues = [self.queued(node) / context for node in prefill]
        usages = [self.decode_kv(node) / node.l1_tokens for node in decode]
        ready = len(prefill), len(decode)
        wished = (
            prefill_wish(queues, ready[0], consolidates=self.consolidates),
            decode_wish(usages, ready[1], consolidates=self.consolidates),
        )
        ordered = self.budget(ready, wished, len(nodes))
        why = f"queue {max(queues, default=0.0):.2f} contexts, KV {max(usages, default=0.0):.2f} of memory"
        leaving = [
            *self._newest(prefill, ready[0] - ordered[0]),
            *self._newest(decode, ready[1] - ordered[1]),
        ]
        free = [*(node.name for node in nodes if node.phase is None), *leaving]
        coming = [Phase.PREFILL] * (ordered[0] - ready[0]) + [Phase.DECODE] * (ordered[1] - ready[1])
        moves = [Move(name, phase, why) for name, phase in zip(free, coming, strict=False)]
        taken = {move.node for move in moves}
        return [*moves, *(Move(name, None, why) for name in leaving if name not in taken)]

    def _newest(self, workers: Sequence[NodeView], count: int) -> list[str]:
        """Names of the workers that were ready last."""
        names = sorted((node.name for node in workers), key=lambda name: (self._joined.get(name, 0.0), name))
        return names[len(names) - count :] if count > 0 else []
