"""Non-negative least squares over relative errors, and terms that are kept only if they lower the held-out error."""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from services.planner.core.model_rows import Matrix

FOLDS = 4
FOLD_ROWS = 3
"""Held-out rows come in runs of this many, since neighbours in time are alike."""
LOWERS_BY, LOWERS_AT_LEAST = 0.02, 1e-4
"""A further term must lower the held-out error by this share of it and by this much: less is what chance does."""


def fit(features: Matrix, busy_s: Matrix, columns: Sequence[int]) -> Matrix:
    """Coefficients of `columns` (the others are 0) that minimise the squared relative error of the rows.

    `features` is (rows, all columns). Equation: sum over columns of coefficient*feature = busy_s, all >= 0.
    """
    used = features[:, list(columns)] / busy_s[:, None]
    scale = used.max(axis=0)
    scale[scale == 0.0] = 1.0
    solution, _ = nnls(used / scale, np.ones(len(busy_s)), maxiter=50 * len(columns))
    coefficients = np.zeros(features.shape[1])
    coefficients[list(columns)] = solution / scale
    return coefficients


def relative_errors(coefficients: Matrix, features: Matrix, busy_s: Matrix) -> Matrix:
    """|predicted - busy| / busy of each row."""
    return np.abs(features @ coefficients / busy_s - 1.0)


def held_out_error(features: Matrix, busy_s: Matrix, columns: Sequence[int]) -> float:
    """Mean relative error of rows that were left out of the fit, over `FOLDS` folds; inf for too few rows."""
    fold = np.arange(len(busy_s)) // FOLD_ROWS % FOLDS
    errors: list[Matrix] = []
    for out in range(FOLDS):
        inside = fold != out
        if inside.sum() < len(columns) or inside.all():
            return float("inf")
        coefficients = fit(features[inside], busy_s[inside], columns)
        errors.append(relative_errors(coefficients, features[~inside], busy_s[~inside]))
    return float(np.mean(np.concatenate(errors)))


def choose_terms(features: Matrix, busy_s: Matrix, base: Sequence[int], optional: Sequence[int]) -> tuple[int, ...]:
    """`base`, and the one optional column that lowers the held-out error most, if any does."""
    best, lowest = tuple(base), held_out_error(features, busy_s, base)
    bound = lowest * (1.0 - LOWERS_BY) - LOWERS_AT_LEAST
    for column in optional:
        if not features[:, column].any():
            continue
        error = held_out_error(features, busy_s, (*base, column))
        if error < bound and error < lowest:
            best, lowest = (*base, column), error
    return best
