"""The scale on which pools are told what copies are worth: small numbers, equal steps of the logarithm."""

from __future__ import annotations

from bisect import bisect_right
from math import ceil, log2

from schemas.kv import NEUTRAL

STEPS = 4
"""Steps per doubling."""
LEAST_PER_S = 1e-5
LEAST, LARGEST = 1, NEUTRAL - 1
AWAKE = 255
"""A request of the branch is under way."""
DEEPEST = 64


def step_of(rate_per_s: float) -> int:
    """Expected returns per second as a number from 1 to LARGEST."""
    return max(LEAST, min(LARGEST, 1 + round(STEPS * log2(rate_per_s / LEAST_PER_S)))) if rate_per_s > 0.0 else LEAST


def rate_of(step: int) -> float:
    """The rate in the middle of a step."""
    return LEAST_PER_S * float(2.0 ** ((step - 1) / STEPS))


class DepthCost:
    """What a token costs to compute again grows with the tokens before it: c1 + c2 * depth. So a block at depth d is
    worth 1 + d / doubling times one at the start; here in steps, with the block numbers at which they change."""

    def __init__(self, doubling_blocks: float) -> None:
        self._at = [doubling_blocks * (2.0 ** ((step + 0.5) / STEPS) - 1.0) for step in range(DEEPEST)]

    def steps(self, depth: int) -> int:
        """Steps to add for a block at this depth."""
        return bisect_right(self._at, depth)

    def pieces(self, first: int, last: int) -> list[tuple[int, int]]:
        """Blocks [first, last) as (end, steps to add) in ascending order."""
        low, high = self.steps(first), self.steps(last - 1)
        pieces: list[tuple[int, int]] = []
        for step in range(low, high):
            end = min(last, ceil(self._at[step]))
            if end > first:
                pieces.append((end, step))
                first = end
        return [*pieces, (last, high)]
