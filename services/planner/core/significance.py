"""Whether a gain seen in a few slices is more than chance."""

from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from services.planner.core.model_rows import Matrix

_MOST_CORRELATED = 0.5


@dataclass(frozen=True, slots=True)
class Tested:
    """Mean gain, its standard error, the bound the mean must exceed, and whether it does."""

    mean: float
    stderr: float
    threshold: float

    @property
    def passes(self) -> bool:
        return self.mean > self.threshold


def plain_test(gains: Matrix, stderrs: float) -> list[Tested]:
    """mean > `stderrs` standard errors, each candidate for itself. `gains` is (candidates, slices, 2 at least)."""
    errors = _stderr(gains)
    return [
        Tested(float(mean), float(error), stderrs * float(error))
        for mean, error in zip(gains.mean(axis=1), errors, strict=True)
    ]


def corrected_test(gains: Matrix, stderrs: float, family_error: float, effect: float) -> list[Tested]:
    """The same with neighbouring slices taken as alike, at least `effect`, and Holm's correction over the candidates.

    Holm (1979): the largest of m t-values must exceed the quantile of family_error/m, the next that of
    family_error/(m-1) and so on; the first that does not ends it.
    """
    count, slices = gains.shape
    errors = _stderr(gains) * _correlation_factor(gains)
    mean = gains.mean(axis=1)
    t = np.where(errors > 0, mean / np.where(errors > 0, errors, 1.0), np.where(mean > 0, np.inf, -np.inf))
    tested: dict[int, Tested] = {}
    bound, stopped = stderrs, False
    for rank, index in enumerate(np.argsort(-t)):
        if not stopped:
            bound = max(stderrs, float(stdtrit(slices - 1, 1.0 - family_error / (count - rank))))
        threshold = max(bound * float(errors[index]), effect)
        tested[int(index)] = Tested(float(mean[index]), float(errors[index]), threshold)
        stopped = stopped or not float(t[index]) > bound
    return [tested[index] for index in range(count)]


def every_slice_test(gains: Matrix, effect: float) -> list[Tested]:
    """Above `effect` in each slice: a trend passes, what a slice or two had by chance does not."""
    mean, worst, errors = gains.mean(axis=1), gains.min(axis=1), _stderr(gains)
    return [Tested(*map(float, numbers)) for numbers in zip(mean, errors, effect + mean - worst, strict=True)]


def _stderr(gains: Matrix) -> Matrix:
    errors: Matrix = gains.std(axis=1, ddof=1) / np.sqrt(gains.shape[1])
    return errors


def _correlation_factor(gains: Matrix) -> Matrix:
    """sqrt((1+r)/(1-r)) with r the lag-one autocorrelation of the slices, where it is positive and can be told."""
    if gains.shape[1] < 4:
        return np.ones(len(gains))
    off = gains - gains.mean(axis=1, keepdims=True)
    square = (off * off).sum(axis=1)
    lag = (off[:, 1:] * off[:, :-1]).sum(axis=1)
    r = np.clip(lag / np.where(square > 0, square, 1.0), 0.0, _MOST_CORRELATED)
    factor: Matrix = np.sqrt((1.0 + r) / (1.0 - r))
    return factor
