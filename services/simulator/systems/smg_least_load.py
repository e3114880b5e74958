"""Model Gateway's `least_load`: the shortest time to drain plus pressure on KV, on a fixed split of plain SGLang nodes.

Rule: lightseekorg/smg policies/least_load.rs, defaults: (uncached tokens queued at the last poll + tokens sent there
since) / throughput + 0.15 s * k / (1 - k), k the KV usage at the last poll, at most 0.999; polls every 10 s;
throughput 2,000 tokens/s, since prefill workers generate nothing; the smallest score, ties to the first. Decode round
robin. Approximate: k counts prompts in prefill, as cached blocks can be evicted.
"""

from collections.abc import Sequence

from schemas.phase import Phase
from services.simulator.call import Call
from services.simulator.passive import Passive
from services.simulator.system import Action, NodeView, Place
from services.simulator.systems.signals import prefill_kv_tokens
from services.simulator.systems.static import RoundRobin, Static

POLL_S = 10.0
PRESSURE_S = 0.15
THROUGHPUT = 2000.0
FULLEST = 0.999


def score(queued_tokens: int, sent_tokens: int, usage: float) -> float:
    """Seconds that a request would wait there, as the gateway sees it."""
    usage = min(max(usage, 0.0), FULLEST)
    return (queued_tokens + sent_tokens) / THROUGHPUT + PRESSURE_S * usage / (1.0 - usage)


class SmgLeastLoad(Passive):
    """`_polled`: per prefill worker (uncached tokens queued, KV usage) at the last poll, `_sent` tokens since."""

    id = "smg-least-load"
    traits = Static.traits

    def __init__(self) -> None:
        self.decode = RoundRobin()
        self._due = 0.0
        self._polled: dict[str, tuple[int, float]] = {}
        self._sent: dict[str, int] = {}

    def arrived(self, call: Call, now: float) -> Sequence[Action]:
        chosen = min(self.cluster.serving(Phase.PREFILL), key=self._score).name
        self._sent[chosen] = self._sent.get(chosen, 0) + call.prompt_tokens
        return (Place(call, chosen, self.decode.choose(self.cluster.serving(Phase.DECODE))),)

    def _score(self, node: NodeView) -> float:
        queued, usage = self._polled.get(node.name, (0, 0.0))
        return score(queued, self._sent.get(node.name, 0), usage)

    def next_wake(self, now: float) -> float | None:
        return self._due

    def wake(self, now: float) -> Sequence[Action]:
        for node in self.cluster.serving(Phase.PREFILL):
            self._polled[node.name] = node.queued_uncached, prefill_kv_tokens(node) / node.l1_tokens
            self._sent[node.name] = 0
        self._due = now + POLL_S
        return ()
