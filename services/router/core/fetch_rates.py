"""How long KV takes from one node's host memory to another's, as it was seen: tokens over a rate, plus a latency."""

from dataclasses import dataclass

import numpy as np

from services.router.core.placement import FetchCost
from services.router.core.roster import Floats

_MEMORY = 0.9
"""What the sums of a pair keep at each new fetch: about the last ten count."""
_LEAST = 2.5
"""Fetches (decayed) after which a pair is believed."""
_STUCK = 10.0
"""A fetch that took so many times what was expected, and a second, was given up or waited for something else."""


@dataclass(slots=True)
class _Pair:
    """Decayed sums over fetches of x tokens that took y seconds."""

    n: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        self.n = self.n * _MEMORY + 1.0
        self.x = self.x * _MEMORY + tokens
        self.y = self.y * _MEMORY + seconds
        self.xx = self.xx * _MEMORY + tokens * tokens
        self.xy = self.xy * _MEMORY + tokens * seconds

    def cost(self, default: FetchCost) -> FetchCost:
        """Least squares; where all were of one size the latency is the default one."""
        spread = self.xx - self.x * self.x / self.n
        slope = (self.xy - self.x * self.y / self.n) / spread if spread > 1e-6 * self.xx else 0.0
        if slope <= 0.0:
            beyond_s = max(1e-9, self.y - self.n * default.latency_s)
            return FetchCost(self.x / beyond_s, default.latency_s)
        return FetchCost(1.0 / slope, max(0.0, (self.y - slope * self.x) / self.n))


class FetchRates:
    """Costs of each pair of nodes; `default` until a pair was seen a few times."""

    def __init__(self, default: FetchCost) -> None:
        self.default = default
        self._pairs: dict[str, dict[str, _Pair]] = {}

    def observe(self, source: str, node: str, tokens: int, seconds: float) -> None:
        """A fetch of `tokens` from `source` was there after `seconds`."""
        if tokens <= 0 or seconds <= 0 or seconds > 1.0 + _STUCK * self.cost(source, node).seconds(tokens):
            return
        self._pairs.setdefault(source, {}).setdefault(node, _Pair()).add(float(tokens), seconds)

    def cost(self, source: str, node: str) -> FetchCost:
        """What a fetch from `source` to `node` costs."""
        pair = self._pairs.get(source, {}).get(node)
        return self.default if pair is None or pair.n < _LEAST else pair.cost(self.default)

    def row(self, source: str, index: dict[str, int]) -> tuple[Floats | float, Floats | float]:
        """(tokens per second, latency) from `source` to every node of `index`."""
        known = self._pairs.get(source)
        if not known:
            return self.default.tokens_per_s, self.default.latency_s
        rates, latencies = np.full(len(index), self.default.tokens_per_s), np.full(len(index), self.default.latency_s)
        for node in known:
            row = index.get(node)
            if row is not None:
                cost = self.cost(source, node)
                rates[row], latencies[row] = cost.tokens_per_s, cost.latency_s
        return rates, latencies

    def forget(self, node: str) -> None:
        """A node that is new or came back: what was seen of it is old."""
        self._pairs.pop(node, None)
        for pairs in self._pairs.values():
            pairs.pop(node, None)

    def check(self) -> None:
        for source, pairs in self._pairs.items():
            for node, pair in pairs.items():
                cost = pair.cost(self.default)
                assert cost.tokens_per_s > 0, (source, node)
                assert cost.latency_s >= 0, (source, node)
