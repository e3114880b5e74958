"""Llumnix with prefill and decode instances: dispatch by freeness, live migration of running decodes, auto-scaling.

Rules: AlibabaPAI/llumnix at 24220fb (OSDI'24), its defaults. Blocks are vLLM's, 16 tokens.
Dispatch (`cacheaware`): among prefill instances whose wanted blocks are below all they have (kv_blocks_ratio < 1; all
if none), the one with the longest prefix, without any the least ratio. Decode: most remaining steps = (free blocks -
blocks of those that wait) / (running + waiting), instances below 10 only if all are. Migration, every 50 ms: decode
instances with fewer than 3 remaining steps, fullest first, are paired with those above, emptiest first (`defrag`); each
source sends its shortest running request, one at a time. Scaling, every 10 s: a pool below 10 steps on average wants an
instance, one above 60 can spare one.

Approximate: Llumnix adds and removes instances; with a fixed number of nodes one moves from the pool that can spare to
the one that wants, restarted (666 to 831 s, as Dynamo's workers), its KV lost. Migration is one copy with the request
running on, not three stages. Adaptive PD and the KV store behind the cache-aware query are off. Nodes are plain
SGLang's (HiCache, LRU) instead of vLLM's.
"""

from collections.abc import Sequence
from math import inf

from schemas.phase import Phase
from services.simulator.call import Call
from services.simulator.passive import Passive
from services.simulator.system import Action, Migrate, Move, NodeView, Place, SwitchCost, Traits
from services.simulator.systems.dynamo_kv_router import RELAUNCH_S
from services.simulator.systems.signals import decode_kv_tokens, prefill_kv_tokens, prefilled, queued_prompt_tokens

BLOCK_TOKENS = 16
POLL_S, SCALING_S = 0.05, 10.0
BUSY_STEPS, BUSY_RATIO = 10.0, 1.0
MIGRATE_OUT_STEPS = 3.0
SCALE_UP_STEPS, SCALE_DOWN_STEPS = 10.0, 60.0


def steps(free_tokens: float, waiting_tokens: float, requests: int) -> float:
    """Remaining steps: blocks that each request can still take."""
    return (free_tokens - waiting_tokens) / BLOCK_TOKENS / requests if requests else inf


def blocks_ratio(node: NodeView) -> float:
    """Blocks that a prefill instance uses or owes to those that wait, over all it has."""
    return (prefill_kv_tokens(node) + queued_prompt_tokens(node)) / node.l1_tokens


def decode_steps(nodes: Sequence[NodeView]) -> float:
    """Remaining steps of decode instances taken as one."""
    tokens = sum(node.l1_tokens for node in nodes)
    wanted = sum(decode_kv_tokens(node) for node in nodes)
    return steps(tokens, wanted, sum(len(node.decode_calls) for node in nodes))


def prefill_steps(nodes: Sequence[NodeView]) -> float:
    """Remaining steps of prefill instances taken as one."""
    tokens = sum(node.l1_tokens * (1.0 - blocks_ratio(node)) for node in nodes)
    return steps(tokens, 0.0, sum(len(node.prefill_calls) for node in nodes))


class Llumnix(Passive):
    """`_migrating`: sources with a migration under way, and the request that moves."""

    id = "llumnix"
    traits = Traits(token_after_transfer=True, host_copies=4, switch=SwitchCost(relaunch_s=RELAUNCH_S, keeps_kv=False))

    def __init__(self, *, scaling: bool = True) -> None:
        self.scaling = scaling
        self.migrations = 0
        self._due, self._scale_due = POLL_S, SCALING_S
        self._migrating: dict[str, tuple[Call, float]] = {}
        self._held: dict[str, Call] = {}

    def arrived(self, call: Call, now: float) -> Sequence[Action]:
        prefill, decode = self.cluster.serving(Phase.PREFILL), self.cluster.serving(Phase.DECODE)
        if not prefill or not decode:
            self._held[call.id] = call
            return ()
        return (Place(call, self.prefill(call, prefill), self.decode(decode)),)

    def prefill(self, call: Call, nodes: Sequence[NodeView]) -> str:
        """The prefill instance for a request."""
        ratio = {node.name: blocks_ratio(node) for node in nodes}
        idle = [node for node in nodes if ratio[node.name] < BUSY_RATIO] or nodes
        return min(idle, key=lambda node: (-node.cached_blocks(call)[1], ratio[node.name])).name

    def decode(self, nodes: Sequence[NodeView]) -> str:
        """The decode instance for a request."""
        return max(nodes, key=lambda node: decode_steps([node])).name

    def moved(self, node: str, now: float) -> Sequence[Action]:
        held, self._held = self._held, {}
        return [action for call in held.values() for action in self.arrived(call, now)]

    def next_wake(self, now: float) -> float | None:
        return min(self._due, self._scale_due)

    def wake(self, now: float) -> Sequence[Action]:
        actions: list[Action] = []
        if now >= self._due:
            self._due = now + POLL_S
            actions += self._migrate(now)
        if now >= self._scale_due:
            self._scale_due = now + SCALING_S
            actions += self._scale()
        return actions

    def _migrate(self, now: float) -> list[Migrate]:
        nodes = self.cluster.serving(Phase.DECODE)
        free = {node.name: decode_steps([node]) for node in nodes}
        self._migrating = {
            name: (call, until)
            for name, (call, until) in self._migrating.items()
            if call.decode_node == name and call.ended_at is None and now < until
        }
        sources = sorted((n for n in nodes if free[n.name] < MIGRATE_OUT_STEPS), key=lambda n: free[n.name])
        sinks = sorted((n for n in nodes if free[n.name] > MIGRATE_OUT_STEPS), key=lambda n: -free[n.name])
        moves: list[Migrate] = []
        for source, sink in zip(sources, sinks, strict=False):
            running = [call for call in source.decode_calls.values() if prefilled(call)]
            if not running or source.name in self._migrating:
                continue
            shortest = min(running, key=lambda call: (call.prompt_tokens, call.id))
            copy_s = self.cluster.hardware.transfer_s(shortest.prompt_tokens)
            self._migrating[source.name] = shortest, now + 2 * copy_s + POLL_S
            self.migrations += 1
            moves.append(Migrate(shortest, sink.name))
        return moves

    def _scale(self) -> list[Move]:
        if not self.scaling or any(node.moving for node in self.cluster.nodes.values()):
            return []
        prefill, decode = self.cluster.serving(Phase.PREFILL), self.cluster.serving(Phase.DECODE)
        free = prefill_steps(prefill), decode_steps(decode)
        why = f"steps left: prefill {free[0]:.0f}, decode {free[1]:.0f}"
        if free[1] < SCALE_UP_STEPS and free[0] > SCALE_DOWN_STEPS and len(prefill) > 1:
            least = min(prefill, key=lambda node: (len(node.prefill_calls), node.name))
            return [Move(least.name, Phase.DECODE, why)]
        if free[0] < SCALE_UP_STEPS and free[1] > SCALE_DOWN_STEPS and len(decode) > 1:
            least = min(decode, key=lambda node: (len(node.decode_calls), node.name))
            return [Move(least.name, Phase.PREFILL, why)]
        return []
