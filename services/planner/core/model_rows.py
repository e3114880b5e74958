"""Iterations to rows of a fit: a row is what one node did of one phase, at one order of size, within about a second.

A prefill row reads  busy_s = c0*n + c1*sum(t_uc) + c2*sum(A) + c3*sum(t_rst) + c4*media + c5*sum(max(0, t_uc - u0)),
a decode row         busy_s = d0*n + d1*sum(phi(B)) + d2*sum(B) + d3*sum(context)/1e6.
The knee is taken over the tokens of an iteration: launches belong to it, and telemetry tells no single requests apart.
Iterations of different octaves (of sum(t_uc), of B) stand in rows of their own, and all octaves weigh the same in the
fit: warm-up runs at one load most of the time, and the models must hold at others.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from schemas.iteration_model import MEGA
from schemas.phase import Phase
from schemas.telemetry import Iteration

Matrix = npt.NDArray[np.float64]
PREFILL_TERMS = ("c0", "c1", "c2", "c3", "c4")
DECODE_TERMS = ("d0", "d1", "d2", "d3")
"""The last of each is optional; knees come after those of prefill."""
MEDIA = PREFILL_TERMS.index("c4")
REACH_TOKENS, REACH_CONTEXT, REACH_MEDIA, REACH_RUNNING = 8192, 100_000, 8, 64
"""A large iteration: uncached tokens of a prefill, context of a request, media, requests of a decode."""


class Rows:
    """The newest `kept` rows, oldest first; the first column of `features` counts iterations."""

    def __init__(self, columns: int, kept: int) -> None:
        self._kept = kept
        self._rows = np.empty((2 * kept, columns + 2))
        self._end = 0

    def __len__(self) -> int:
        return min(self._end, self._kept)

    def add(self, features: Matrix, busy_s: float, octave: int) -> None:
        """Append one row."""
        if self._end == len(self._rows):
            self._rows[: self._kept] = self._rows[self._end - self._kept :]
            self._end = self._kept
        self._rows[self._end, :-2] = features
        self._rows[self._end, -2:] = busy_s, octave
        self._end += 1

    @property
    def features(self) -> Matrix:
        """(rows, columns)."""
        return self._here[:, :-2]

    @property
    def busy_s(self) -> Matrix:
        return self._here[:, -2]

    @property
    def weights(self) -> Matrix:
        """Of each row's squared error: one over the rows of its octave."""
        _, place, counts = np.unique(self._here[:, -1], return_inverse=True, return_counts=True)
        weights: Matrix = 1.0 / counts[place]
        return weights

    @property
    def _here(self) -> Matrix:
        return self._rows[self._end - len(self) : self._end]


@dataclass(slots=True)
class OpenRow:
    """Sums over the iterations of one octave."""

    features: Matrix
    busy_s: float = 0.0

    def add(self, features: Matrix, busy_s: float) -> None:
        self.features = self.features + features
        self.busy_s += busy_s


@dataclass(frozen=True, slots=True)
class Columns:
    """How an iteration becomes features: the knees that are tried, and k/E of the decode model."""

    knee_tokens: tuple[int, ...] = ()
    expert_share: float = 0.0

    def count(self, phase: Phase) -> int:
        return len(PREFILL_TERMS) + len(self.knee_tokens) if phase is Phase.PREFILL else len(DECODE_TERMS)

    def reach(self, phase: Phase) -> Matrix:
        """The features of one large iteration, its first column left out: what the model must still predict."""
        if phase is Phase.PREFILL:
            knees = (max(1, REACH_TOKENS - knee) for knee in self.knee_tokens)
            pairs = REACH_TOKENS * REACH_CONTEXT
            return np.array((0.0, REACH_TOKENS, pairs, REACH_CONTEXT, REACH_MEDIA, *knees), dtype=float)
        return np.array((0.0, 1.0, REACH_RUNNING, REACH_RUNNING * REACH_CONTEXT / MEGA))

    def octave(self, iteration: Iteration) -> int:
        """The order of size of an iteration: of its uncached tokens, or of its running requests."""
        size = iteration.uncached_tokens if iteration.phase is Phase.PREFILL else iteration.requests
        return max(0, size).bit_length()

    def of(self, iteration: Iteration) -> Matrix | None:
        """The features of one iteration; None if it cannot be a row of a fit."""
        if iteration.requests == 0 or not math.isfinite(iteration.duration_s) or iteration.duration_s <= 0:
            return None
        if iteration.phase is Phase.PREFILL:
            tokens = iteration.uncached_tokens
            if not math.isfinite(iteration.attention_pairs):
                return None
            knees = (max(0, tokens - knee) for knee in self.knee_tokens)
            pairs, restored = iteration.attention_pairs, iteration.restored_tokens
            return np.array((1.0, tokens, pairs, restored, iteration.media, *knees), dtype=float)
        fed = iteration.fed_tokens or iteration.requests
        phi = self.experts_touched(float(fed))
        return np.array((1.0, phi, iteration.requests, iteration.context_tokens / MEGA), dtype=float)

    def experts_touched(self, fed_tokens: float) -> float:
        """phi(B) with t_fwd*B = `fed_tokens`; 0 for a dense model, whose column is dropped."""
        return 1.0 - math.pow(1.0 - self.expert_share, fed_tokens) if self.expert_share else 0.0
