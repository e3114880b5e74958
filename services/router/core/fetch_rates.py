"""How fast KV goes from one node's host memory to another's, as it was seen; the latency is a setting."""

from dataclasses import dataclass

import numpy as np

from services.router.core.placement import FetchCost
from services.router.core.roster import Floats

LEAST_TOKENS = 1024
"""A smaller fetch says nothing of the rate: its time is that of the messages around it."""
_MEMORY = 0.9
"""What the sums of a pair keep at each new fetch: about the last ten count."""
_LEAST = 2.5
"""Fetches (decayed) after which a pair is believed."""
_STUCK = 10.0
"""A fetch that took so many times what was expected, and a second, was given up or waited for something else."""


@dataclass(slots=True)
class _Pair:
    """Decayed sums over fetches."""

    count: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        self.count = self.count * _MEMORY + 1.0
        self.tokens = self.tokens * _MEMORY + tokens
        self.seconds = self.seconds * _MEMORY + seconds


class FetchRates:
    """Costs of each pair of nodes; `default` until a pair was seen a few times."""

    def __init__(self, default: FetchCost) -> None:
        self.default = default
        self._pairs: dict[str, dict[str, _Pair]] = {}

    def observe(self, source: str, node: str, tokens: int, seconds: float) -> None:
        """A fetch of `tokens` from `source` was there after `seconds`."""
        moving_s = seconds - self.default.latency_s
        if tokens < LEAST_TOKENS or moving_s <= 0 or seconds > 1.0 + _STUCK * self.cost(source, node).seconds(tokens):
            return
        self._pairs.setdefault(source, {}).setdefault(node, _Pair()).add(float(tokens), moving_s)

    def cost(self, source: str, node: str) -> FetchCost:
        """What a fetch from `source` to `node` costs."""
        pair = self._pairs.get(source, {}).get(node)
        if pair is None or pair.count < _LEAST:
            return self.default
        return FetchCost(pair.tokens / pair.seconds, self.default.latency_s)

    def row(self, source: str, index: dict[str, int]) -> tuple[Floats | float, float]:
        """(tokens per second, latency) from `source` to every node of `index`."""
        known = self._pairs.get(source)
        if not known:
            return self.default.tokens_per_s, self.default.latency_s
        rates = np.full(len(index), self.default.tokens_per_s)
        for node in known:
            row = index.get(node)
            if row is not None:
                rates[row] = self.cost(source, node).tokens_per_s
        return rates, self.default.latency_s

    def forget(self, node: str) -> None:
        """A node that is new or came back: what was seen of it is old."""
        self._pairs.pop(node, None)
        for pairs in self._pairs.values():
            pairs.pop(node, None)

    def check(self) -> None:
        for source, pairs in self._pairs.items():
            for node in pairs:
                assert self.cost(source, node).tokens_per_s > 0, (source, node)
