"""How long branches stay away between an answer and their next request, learned online from what the directory sees.

For a branch that has been away for some time, keeping its blocks for a while longer costs room for that while and pays
if it comes back in it. The best ratio of the two over all such whiles is what keeping them is worth now: an optimal
stopping index (Gittins 1979), with the distribution of waits taken from counts per kind of wait. It rises towards the
time when most branches of the kind come back and falls behind it, so young sleepers and long ones both go first.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

SHORTEST_S, LONGEST_S, RATIO = 0.5, 7200.0, 1.2
BINS = 2 + int(np.log(LONGEST_S / SHORTEST_S) / np.log(RATIO))
EDGES_S: list[float] = [0.0, *(SHORTEST_S * RATIO**i for i in range(BINS))]
"""Edges of the ages told apart, in seconds: bin i is [EDGES_S[i], EDGES_S[i + 1])."""
PRIOR_HAZARD = 1.0 - 1.0 / RATIO
"""Chance to come back within one bin where nothing is known: waits of all lengths, so the longest away goes first."""
LEAN = 20.0
"""A kind of wait counts with so many observations of all kinds together."""
REMEMBERED = 4096.0
"""Observations of one kind; beyond that older ones count half."""

_F64 = npt.NDArray[np.float64]


class WaitKind(NamedTuple):
    """What is known of a wait when it begins: how the last answer ended, whether branches opened by this one are at
    work, and the octave of the branch's usual wait (-1: none yet)."""

    finish: str
    children: bool
    pace: int


def bin_of(age_s: float) -> int:
    """Which bin an age lies in; the last one is open."""
    return min(bisect_right(EDGES_S, age_s), BINS) - 1


class _Observed:
    """What became of the waits of one kind, by bin of age; `total` of them."""

    __slots__ = ("lost", "returned", "total")

    def __init__(self) -> None:
        self.returned = [0.0] * BINS
        self.lost = [0.0] * BINS
        self.total = 0.0

    def counted(self) -> None:
        self.total += 1.0
        if self.total > REMEMBERED:
            self.returned = [count * 0.5 for count in self.returned]
            self.lost = [count * 0.5 for count in self.lost]
            self.total *= 0.5


class Waits:
    """Counts of returns and of waits that ended otherwise, by kind and age."""

    def __init__(self) -> None:
        self._kinds: dict[WaitKind, _Observed] = {}
        self._rates: dict[WaitKind, list[float]] = {}
        self._usual: list[float] = _indices(np.full((1, BINS), PRIOR_HAZARD))[0].tolist()

    def returned(self, kind: WaitKind, waited_s: float) -> None:
        """A branch came back after this time."""
        observed = self._kinds.get(kind) or self._kinds.setdefault(kind, _Observed())
        observed.returned[bin_of(waited_s)] += 1.0
        observed.counted()

    def lost(self, kind: WaitKind, waited_s: float) -> None:
        """A branch ended, or nobody waits for it any more, after this time."""
        observed = self._kinds.get(kind) or self._kinds.setdefault(kind, _Observed())
        observed.lost[bin_of(waited_s)] += 1.0
        observed.counted()

    def rates(self, kind: WaitKind) -> list[float]:
        """Returns per second of keeping, by bin of age, as of the last `refit`."""
        return self._rates.get(kind, self._usual)

    def refit(self) -> None:
        """Take in what was counted. Cost: a few milliseconds for hundreds of kinds."""
        if not self._kinds:
            return
        returned = np.array([observed.returned for observed in self._kinds.values()])
        lost = np.array([observed.lost for observed in self._kinds.values()])
        exposed = np.cumsum((returned + lost)[:, ::-1], axis=1)[:, ::-1]
        usual = (returned.sum(axis=0) + PRIOR_HAZARD) / (exposed.sum(axis=0) + 1.0)
        own = (returned + LEAN * usual) / (exposed + LEAN)
        indices = _indices(np.vstack([usual, own])).tolist()
        self._usual = indices[0]
        self._rates = dict(zip(self._kinds, indices[1:], strict=True))

    def check(self) -> None:
        """Every observation is counted once, and no rate is beyond a return within the narrowest bin."""
        for observed in self._kinds.values():
            assert abs(sum(observed.returned) + sum(observed.lost) - observed.total) < 1e-6 * REMEMBERED
        for rates in (self._usual, *self._rates.values()):
            assert len(rates) == BINS
            assert all(0.0 <= rate <= 2.0 / ((RATIO - 1.0) * SHORTEST_S) for rate in rates), rates


def _indices(hazards: _F64) -> _F64:
    """Per row and bin the largest ratio, over all later bins, of the chance to be back by then to the time kept."""
    widths = np.diff(np.array([*EDGES_S, EDGES_S[-1] * RATIO]))[:BINS]
    found = np.empty_like(hazards)
    for first in range(BINS):
        ahead = hazards[:, first:]
        away = np.cumprod(np.hstack([np.ones((len(ahead), 1)), 1.0 - ahead[:, :-1]]), axis=1)
        back = np.cumsum(away * ahead, axis=1)
        kept_s = np.cumsum(away * (1.0 - ahead / 2.0) * widths[first:], axis=1)
        found[:, first] = (back / kept_s).max(axis=1)
    return found
