"""The fit of one phase of one node: iterations in, coefficients out; errors are those of rows not yet fitted."""

from collections import deque

import numpy as np

from schemas.phase import Phase
from schemas.telemetry import Iteration
from services.planner.core.model_rows import DECODE_TERMS, PREFILL_TERMS, Columns, Matrix, OpenRow, Rows
from services.planner.core.options import ModelSettings
from services.planner.core.regression import choose_terms, fit

_BASE = {Phase.PREFILL: range(len(PREFILL_TERMS)), Phase.DECODE: range(len(DECODE_TERMS) - 1)}
_GROWTH = 1.25
"""Optional terms are weighed again when there are this many times as many rows as the last time."""


class PhaseFit:
    """`coefficients` of all columns, None before the first fit. `errors`: relative errors of the newest rows, each
    predicted by the fit before it."""

    def __init__(self, phase: Phase, columns: Columns, settings: ModelSettings) -> None:
        self.phase, self._columns, self._settings = phase, columns, settings
        self.rows = Rows(columns.count(phase), settings.rows_kept)
        self.terms = tuple(_BASE[phase])
        self.coefficients: Matrix | None = None
        self.errors: deque[float] = deque(maxlen=settings.newest)
        self.frozen = False
        self.fitted_rows = 0
        self.fed_tokens = 1.0
        self._open: OpenRow | None = None
        self._weighed_at = 0

    def add(self, iteration: Iteration, now: float) -> None:
        """An iteration of this phase; it joins the open row."""
        features = self._columns.of(iteration)
        if features is None:
            return
        if self._open is None:
            self._open = OpenRow(np.zeros(self._columns.count(self.phase)), now)
        self._open.add(features, iteration.duration_s)
        if iteration.fed_tokens:
            self.fed_tokens = iteration.fed_tokens / iteration.requests

    def advance(self, now: float) -> bool:
        """Close the open row if its time is over; whether it did."""
        row = self._open
        if row is None or now - row.since < self._settings.row_s:
            return False
        self._open = None
        if self.coefficients is not None:
            predicted = float(row.features @ self.coefficients)
            self.errors.append(abs(predicted / row.busy_s - 1.0))
        if not self.frozen:
            self.rows.add(row.features, row.busy_s)
        return True

    def refit(self) -> None:
        """Fit all rows anew, and weigh optional terms where there are enough new rows; frozen fits stay."""
        if self.frozen or len(self.rows) < len(self.terms):
            return
        features, busy_s = self.rows.features, self.rows.busy_s
        if self._settings.optional_terms and len(self.rows) >= max(12, _GROWTH * self._weighed_at):
            self._weighed_at = len(self.rows)
            base = _BASE[self.phase]
            self.terms = choose_terms(features, busy_s, base, range(len(base), features.shape[1]))
        self.coefficients = fit(features, busy_s, self.terms)
        self.fitted_rows = len(self.rows)

    def adopt(self, coefficients: Matrix, terms: tuple[int, ...], rows: int) -> None:
        """Take a fit that was frozen elsewhere on `rows` rows."""
        self.coefficients, self.terms, self.fitted_rows, self.frozen = coefficients, terms, rows, True

    @property
    def error(self) -> float | None:
        """Mean relative error of the newest rows, None before there are enough."""
        full = len(self.errors) == self._settings.newest
        return float(np.mean(self.errors)) if full else None

    @property
    def good(self) -> bool:
        """Whether the newest rows were predicted well enough."""
        return self.error is not None and self.error < self._settings.target_error

    def check(self) -> None:
        assert self.coefficients is None or (self.coefficients >= 0).all()
        assert all(np.isfinite(error) for error in self.errors)
        assert set(_BASE[self.phase]) <= set(self.terms)
