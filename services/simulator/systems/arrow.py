"""Arrow: requests go where they meet their latency objectives, and instances are relabelled when none does.

Rules: "Arrow" (arXiv 2505.11916 v2), read through two open implementations: jd-opensource/xllm-service instance_mgr.cpp
and athrael-soju/Narwhal scheduling/ (its constants for the monitor). Profiles are offline: prefill time is quadratic in
the whole prompt, nothing cached; time per output token linear in requests and tokens.
Algorithm 1: prefill where (resident decode tokens, predicted seconds of resident prompts and this one) is least among
those within the TTFT objective; decode where (resident prompt tokens, tokens with this one - most that meet the TPOT
objective) is least among those at most 0. Algorithm 3, when none is eligible: a decode instance becomes a prefill one
if the decode pool's load is below 0.5, a prefill one a decode one unless that happened within 10 s; the instance with
the least resident work, those that still do the other phase first, never the last of a pool; then the cheapest.
Algorithm 2, every second, prefill to decode only: after three passes in a row with decode load >= 1, or prefill load <=
0.5 <= decode load. Loads are means over a pool of predicted prefill seconds over the TTFT objective, and of the token
interval over the TPOT objective. Relabelling takes no time, resident work ends in place.

Approximate: objectives are xLLM's defaults (1 s, 50 ms); the decode instance is chosen when the request is dispatched;
the token interval is the profile's at the present load; KV cached under the old label is out of reach and dropped.
"""

from collections.abc import Sequence
from math import inf

from schemas.phase import Phase
from services.engine.core.timing import DecodeTerms, PrefillTerms, attention_pairs
from services.simulator.call import Call
from services.simulator.passive import Passive
from services.simulator.system import Action, Move, NodeView, Place, SwitchCost, Traits
from services.simulator.systems.signals import decode_kv_tokens, prefilled

TTFT_S, TPOT_S = 1.0, 0.05
EXPAND, SHRINK = 1.0, 0.5
PASSES = 3
MONITOR_S, COOLDOWN_S = 1.0, 10.0

Cost = tuple[float, float]


class Arrow(Passive):
    """`_again`: requests that are placed once more after a relabelling."""

    id = "arrow"
    traits = Traits(token_after_transfer=True, host_copies=4, switch=SwitchCost(keeps_kv=False, at_once=True))

    def __init__(self, ttft_s: float = TTFT_S, tpot_s: float = TPOT_S) -> None:
        self.ttft_s, self.tpot_s = ttft_s, tpot_s
        self._due = MONITOR_S
        self._quiet_until = COOLDOWN_S
        self._passes = 0
        self._again: list[Call] = []

    # Algorithm 1

    def arrived(self, call: Call, now: float) -> Sequence[Action]:
        prefill = {node.name: self.prefill_cost(call, node) for node in self.cluster.serving(Phase.PREFILL)}
        decode = {node.name: self.decode_cost(call, node) for node in self.cluster.serving(Phase.DECODE)}
        moves: list[Action] = []
        if not any(seconds <= self.ttft_s for _, seconds in prefill.values()):
            moves += self._to_prefill()
        elif not any(over <= 0.0 for _, over in decode.values()):
            moves += self._to_decode("no decode instance meets the TPOT objective", now)
        if moves:
            self._again.append(call)
            return moves
        return (self._place(call),)

    def _place(self, call: Call) -> Place:
        prefill = {node.name: self.prefill_cost(call, node) for node in self.cluster.serving(Phase.PREFILL)}
        decode = {node.name: self.decode_cost(call, node) for node in self.cluster.serving(Phase.DECODE)}
        within = {name: cost for name, cost in prefill.items() if cost[1] <= self.ttft_s} or prefill
        fitting = {name: cost for name, cost in decode.items() if cost[1] <= 0.0} or decode
        return Place(call, min(within, key=lambda n: within[n]), min(fitting, key=lambda n: fitting[n]))

    def prefill_cost(self, call: Call, node: NodeView) -> Cost:
        """(resident decode tokens, seconds until its prompt would be done)."""
        return float(self._decode_tokens(node)), self._resident_s(node) + self.prefill_s(call.prompt_tokens)

    def decode_cost(self, call: Call, node: NodeView) -> Cost:
        """(resident prompt tokens, tokens beyond what meets the objective)."""
        most = self.most_tokens(len(node.decode_calls) + 1, node.l1_tokens)
        return float(self._prompt_tokens(node)), decode_kv_tokens(node) + call.prompt_tokens - most

    def prefill_s(self, tokens: int) -> float:
        """Predicted prefill time of a prompt, nothing cached."""
        return self.cluster.times.prefill_s(PrefillTerms(1, tokens, attention_pairs(tokens, 0)))

    def most_tokens(self, requests: int, memory_tokens: int) -> float:
        """Tokens that `requests` may hold together within the TPOT objective and the memory."""
        budget_s = self.tpot_s * self.cluster.hardware.accepted_tokens
        empty_s = self.cluster.times.decode_s(DecodeTerms(requests, 0))
        million_s = self.cluster.times.decode_s(DecodeTerms(requests, 1_000_000)) - empty_s
        most = (budget_s - empty_s) / million_s * 1e6 if million_s > 0 else inf if budget_s >= empty_s else -inf
        return min(most, float(memory_tokens))

    # Algorithm 3

    def _to_prefill(self) -> list[Move]:
        pool = self.cluster.serving(Phase.DECODE)
        if len(pool) < 2 or self.decode_load() >= SHRINK:
            return []
        donor = min(pool, key=lambda node: (not self._prompt_tokens(node), self._decode_tokens(node), node.name))
        return [Move(donor.name, Phase.PREFILL, "no prefill instance meets the TTFT objective")]

    def _to_decode(self, reason: str, now: float) -> list[Move]:
        pool = self.cluster.serving(Phase.PREFILL)
        if len(pool) < 2 or now < self._quiet_until:
            return []
        self._quiet_until = now + COOLDOWN_S
        donor = min(pool, key=lambda node: (not self._decode_tokens(node), self._resident_s(node), node.name))
        return [Move(donor.name, Phase.DECODE, reason)]

    # Algorithm 2

    def next_wake(self, now: float) -> float | None:
        return now if self._again else self._due

    def wake(self, now: float) -> Sequence[Action]:
        again, self._again = self._again, []
        actions: list[Action] = [self._place(call) for call in again]
        if now >= self._due:
            self._due = now + MONITOR_S
            decode, prefill = self.decode_load(), self.prefill_load()
            armed = decode >= EXPAND or prefill <= SHRINK <= decode
            self._passes = self._passes + 1 if armed else 0
            if self._passes >= PASSES:
                actions += self._to_decode(f"decode load {decode:.2f}, prefill load {prefill:.2f}", now)
        return actions

    def prefill_load(self) -> float:
        """Mean over the prefill pool of predicted work over the TTFT objective."""
        pool = self.cluster.serving(Phase.PREFILL)
        return sum(self._resident_s(node) for node in pool) / self.ttft_s / max(1, len(pool))

    def decode_load(self) -> float:
        """Mean over the decode pool of the token interval over the TPOT objective."""
        pool = self.cluster.serving(Phase.DECODE)
        return sum(self._interval_s(node) for node in pool) / self.tpot_s / max(1, len(pool))

    def _interval_s(self, node: NodeView) -> float:
        if not node.decoding:
            return 0.0
        terms = DecodeTerms(node.decoding, node.decode_kv)
        return self.cluster.times.decode_s(terms) / self.cluster.hardware.accepted_tokens

    def _resident_s(self, node: NodeView) -> float:
        return sum(self.prefill_s(call.prompt_tokens) for call in node.prefill_calls.values() if not prefilled(call))

    def _prompt_tokens(self, node: NodeView) -> int:
        return sum(call.prompt_tokens for call in node.prefill_calls.values() if not prefilled(call))

    def _decode_tokens(self, node: NodeView) -> int:
        return decode_kv_tokens(node)
