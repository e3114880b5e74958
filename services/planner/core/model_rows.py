"""Iterations to rows of a fit: one row is what one node did of one phase within about a second.

A prefill row reads  busy_s = c0*n + c1*sum(t_uc) + c2*sum(A) + c3*sum(t_rst) + c5*sum(max(0, t_uc - u0)),
a decode row         busy_s = d0*n + d1*sum(phi(B)) + d2*sum(B) + d3*sum(context)/1e6.
The knee is taken over the tokens of an iteration: launches belong to it, and telemetry tells no single requests apart.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from schemas.iteration_model import MEGA
from schemas.phase import Phase
from schemas.telemetry import Iteration

Matrix = npt.NDArray[np.float64]
PREFILL_TERMS = ("c0", "c1", "c2", "c3")
DECODE_TERMS = ("d0", "d1", "d2", "d3")


class Rows:
    """The newest `kept` rows, oldest first; the first column of `features` counts iterations."""

    def __init__(self, columns: int, kept: int) -> None:
        self._kept = kept
        self._rows = np.empty((2 * kept, columns + 1))
        self._end = 0

    def __len__(self) -> int:
        return min(self._end, self._kept)

    def add(self, features: Matrix, busy_s: float) -> None:
        """Append one row."""
        if self._end == len(self._rows):
            self._rows[: self._kept] = self._rows[self._end - self._kept :]
            self._end = self._kept
        self._rows[self._end, :-1] = features
        self._rows[self._end, -1] = busy_s
        self._end += 1

    @property
    def features(self) -> Matrix:
        """(rows, columns)."""
        return self._rows[self._end - len(self) : self._end, :-1]

    @property
    def busy_s(self) -> Matrix:
        return self._rows[self._end - len(self) : self._end, -1]


@dataclass(slots=True)
class OpenRow:
    """The row being filled: sums over the iterations of one phase since `since`."""

    features: Matrix
    since: float
    busy_s: float = 0.0
    iterations: int = 0

    def add(self, features: Matrix, busy_s: float) -> None:
        self.features += features
        self.busy_s += busy_s
        self.iterations += 1


@dataclass(frozen=True, slots=True)
class Columns:
    """How an iteration becomes features: the knees that are tried, and k/E of the decode model."""

    knee_tokens: tuple[int, ...] = ()
    expert_share: float = 0.0

    def count(self, phase: Phase) -> int:
        return len(PREFILL_TERMS) + len(self.knee_tokens) if phase is Phase.PREFILL else len(DECODE_TERMS)

    def of(self, iteration: Iteration) -> Matrix | None:
        """The features of one iteration; None if it cannot be a row of a fit."""
        if iteration.requests == 0 or not math.isfinite(iteration.duration_s) or iteration.duration_s <= 0:
            return None
        if iteration.phase is Phase.PREFILL:
            tokens = iteration.uncached_tokens
            if not math.isfinite(iteration.attention_pairs):
                return None
            knees = (max(0, tokens - knee) for knee in self.knee_tokens)
            return np.array((1.0, tokens, iteration.attention_pairs, iteration.restored_tokens, *knees), dtype=float)
        fed = iteration.fed_tokens or iteration.requests
        phi = self.experts_touched(float(fed))
        return np.array((1.0, phi, iteration.requests, iteration.context_tokens / MEGA), dtype=float)

    def experts_touched(self, fed_tokens: float) -> float:
        """phi(B) with t_fwd*B = `fed_tokens`; 0 for a dense model, whose column is dropped."""
        return 1.0 - math.pow(1.0 - self.expert_share, fed_tokens) if self.expert_share else 0.0
