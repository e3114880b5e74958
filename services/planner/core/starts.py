"""What began in a slice, told from what ended in it and from what runs at its two ends. Ours.

While the work changes, requests that end are those of a while ago, and the long ones among them: who counts their
answers takes the work for what it was. A table of lives does not: of the requests that came to 2**k tokens in the
slice, some ended before 2**(k+1) and some went on, whenever they began. So the mean answer of those that begin now is
the sum over k of the share that comes to 2**k, times the share of these that ends there, times the mean length of such.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from schemas.telemetry import LENGTH_CLASSES, length_class

Vector = npt.NDArray[np.float64]
LEAST_STARTS = 8.0
"""Fewer say less than the requests that ended."""
_PREFILL_FEATURES = 3


@dataclass(slots=True)
class Starts:
    """Sums over a slice. `ended[k]`, `tokens[k]`: requests that ended with an answer of class k, and their tokens;
    `reached[k]`: those that came to 2**k tokens, so `reached[0]` began (0: not known). `prefill`: uncached tokens,
    query-key pairs and media of the prefill iterations. `told`: what ran at both ends is known."""

    ended: Vector = field(default_factory=lambda: np.zeros(LENGTH_CLASSES))
    tokens: Vector = field(default_factory=lambda: np.zeros(LENGTH_CLASSES))
    reached: Vector = field(default_factory=lambda: np.zeros(LENGTH_CLASSES + 1))
    prefill: Vector = field(default_factory=lambda: np.zeros(_PREFILL_FEATURES))
    told: bool = False

    def end(self, tokens: int) -> None:
        """A request ended with so many output tokens."""
        k = length_class(tokens)
        self.ended[k] += 1
        self.tokens[k] += tokens

    def iterated(self, uncached_tokens: int, attention_pairs: float, media: int) -> None:
        """A prefill iteration."""
        self.prefill += (uncached_tokens, attention_pairs, media)

    def ran(self, before: Vector, after: Vector) -> None:
        """Requests in decode by class at the beginning and at the end of the slice: what came to a class is what there
        is more of, what ended there, and what went on from there."""
        self.told = True
        for k in range(LENGTH_CLASSES - 1, -1, -1):
            self.reached[k] = max(0.0, after[k] - before[k] + self.ended[k] + self.reached[k + 1])

    def plus(self, other: "Starts") -> "Starts":
        """Both together; what began is told where both tell it."""
        return Starts(
            self.ended + other.ended,
            self.tokens + other.tokens,
            self.reached + other.reached,
            self.prefill + other.prefill,
            self.told and other.told,
        )

    @property
    def known(self) -> bool:
        """Whether enough began to say what begins, and its prefill was seen."""
        return bool(self.told and self.reached[0] >= LEAST_STARTS and self.prefill[0] > 0)

    def output_tokens(self) -> float:
        """Mean answer of a request that begins. Of those that come to more than anybody did, what they have counts."""
        share, mean, last = 1.0, 0.0, int(np.flatnonzero(self.reached[:LENGTH_CLASSES] + self.ended).max(initial=0))
        for k in range(last + 1):
            came_to_end = self.reached[k + 1] + self.ended[k]
            if came_to_end > 0:
                if self.ended[k]:
                    mean += share * self.tokens[k] / came_to_end
                share *= self.reached[k + 1] / came_to_end
        return float(mean + share * 2**last)

    def means(self) -> Sequence[float]:
        """Uncached tokens, query-key pairs and media of a request that begins."""
        means: list[float] = (self.prefill / self.reached[0]).tolist()
        return means

    def check(self) -> None:
        for vector in (self.ended, self.tokens, self.reached, self.prefill):
            assert np.isfinite(vector).all()
            assert (vector >= 0).all()
