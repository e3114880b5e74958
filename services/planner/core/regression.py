"""Non-negative least squares over relative errors, and terms that are kept only if they lower the held-out error."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from services.planner.core.model_rows import Matrix

FOLDS = 4
FOLD_ROWS = 3
"""Held-out rows come in runs of this many, since neighbours in time are alike."""
LOWERS_BY, LOWERS_AT_LEAST = 0.02, 1e-4
"""A further term must lower the held-out error by this share of it and by this much: less is what chance does."""

PENALTY = 1e-4
"""Weight, in rows of an octave, of the squared share that a term has in a large iteration. Warm-up at a low load tells
terms apart badly: of fits that agree where it ran, the one that explodes least elsewhere is taken."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Rows of a fit: features (rows, columns), busy seconds, weights of squared relative errors; `reach`: the features
    of a large iteration (0 for a column that is not held back)."""

    features: Matrix
    busy_s: Matrix
    weights: Matrix
    reach: Matrix

    def part(self, rows: npt.NDArray[np.bool_]) -> "Sample":
        return Sample(self.features[rows], self.busy_s[rows], self.weights[rows], self.reach)


def fit(sample: Sample, columns: Sequence[int]) -> Matrix:
    """Coefficients of `columns` (the others are 0) that minimise the weighted squared relative error of the rows.

    Equation of a row: sum over columns of coefficient*feature = busy_s, all coefficients >= 0.
    """
    root, taken = np.sqrt(sample.weights), list(columns)
    used = sample.features[:, taken] * (root / sample.busy_s)[:, None]
    each_s = np.average(sample.busy_s / sample.features[:, 0], weights=sample.weights)
    held = np.diag(np.sqrt(PENALTY) * sample.reach[taken] / each_s)
    rows = np.concatenate([used, held])
    scale = rows.max(axis=0)
    scale[scale == 0.0] = 1.0
    solution, _ = nnls(rows / scale, np.concatenate([root, np.zeros(len(taken))]), maxiter=50 * len(taken))
    coefficients = np.zeros(sample.features.shape[1])
    coefficients[taken] = solution / scale
    return coefficients


def relative_errors(coefficients: Matrix, sample: Sample) -> Matrix:
    """|predicted - busy| / busy of each row."""
    return np.abs(sample.features @ coefficients / sample.busy_s - 1.0)


def held_out_error(sample: Sample, columns: Sequence[int]) -> float:
    """Weighted mean relative error of rows that were left out of the fit, over `FOLDS` folds; inf for too few rows."""
    fold = np.arange(len(sample.busy_s)) // FOLD_ROWS % FOLDS
    error = 0.0
    for out in range(FOLDS):
        inside = fold != out
        if inside.sum() < len(columns) or inside.all():
            return float("inf")
        left_out = sample.part(~inside)
        error += float(left_out.weights @ relative_errors(fit(sample.part(inside), columns), left_out))
    return error / float(sample.weights.sum())


def choose_terms(sample: Sample, base: Sequence[int], optional: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """`base`, and of each group of optional columns at most one: always the one that lowers the held-out error most,
    until none does."""
    terms, lowest = tuple(base), held_out_error(sample, base)
    left = [[column for column in group if sample.features[:, column].any()] for group in optional]
    while any(left):
        errors = {column: held_out_error(sample, (*terms, column)) for group in left for column in group}
        best = min(errors, key=errors.__getitem__)
        if errors[best] >= lowest * (1.0 - LOWERS_BY) - LOWERS_AT_LEAST:
            break
        terms, lowest = (*terms, best), errors[best]
        left = [group for group in left if best not in group]
    return tuple(sorted(terms))
