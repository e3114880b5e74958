"""The fit of one phase of one node: iterations in, coefficients out; errors are those of rows not yet fitted."""

from collections import deque

import numpy as np

from schemas.phase import Phase
from schemas.telemetry import Iteration
from services.planner.core.model_rows import DECODE_TERMS, MEDIA, PREFILL_TERMS, Columns, Matrix, OpenRow, Rows
from services.planner.core.options import ModelSettings
from services.planner.core.regression import Sample, choose_terms, fit

_BASE = {Phase.PREFILL: range(len(PREFILL_TERMS) - 1), Phase.DECODE: range(len(DECODE_TERMS) - 1)}
_GROWTH = 1.25
"""Optional terms are weighed again when there are this many times as many rows as the last time."""


class PhaseFit:
    """`coefficients` of all columns, None before the first fit. `errors`: relative errors of the newest rows, each
    predicted by the fit before it. `saw_media`: it knows what media take, or learns it."""

    def __init__(self, phase: Phase, columns: Columns, settings: ModelSettings) -> None:
        self.phase, self._columns, self._settings = phase, columns, settings
        self.rows = Rows(columns.count(phase), settings.rows_kept)
        self.terms = tuple(_BASE[phase])
        self.coefficients: Matrix | None = None
        self.errors: deque[float] = deque(maxlen=settings.newest)
        self.frozen = self.saw_media = False
        self.fitted_rows = 0
        self.fed_tokens = 1.0
        self._open: dict[int, OpenRow] = {}
        self._since = 0.0
        self._weighed_at = 0

    def add(self, iteration: Iteration, now: float) -> None:
        """An iteration of this phase; it joins the open row. A frozen fit begins anew with the first medium it sees."""
        features = self._columns.of(iteration)
        if features is None:
            return
        if iteration.media and not self.saw_media:
            self.saw_media = True
            self._weighed_at = 0
            if self.frozen:
                self._begin_anew()
        if not self._open:
            self._since = now
        row = self._open.setdefault(self._columns.octave(iteration), OpenRow(np.zeros(len(features))))
        row.add(features, iteration.duration_s)
        if iteration.fed_tokens:
            self.fed_tokens = iteration.fed_tokens / iteration.requests

    def advance(self, now: float) -> bool:
        """Close the open rows if their time is over; whether it did."""
        if not self._open or now - self._since < self._settings.row_s:
            return False
        if self.coefficients is not None:
            features = np.sum([row.features for row in self._open.values()], axis=0)
            busy_s = sum(row.busy_s for row in self._open.values())
            self.errors.append(abs(float(features @ self.coefficients) / busy_s - 1.0))
        if not self.frozen:
            for octave, row in self._open.items():
                self.rows.add(row.features, row.busy_s, octave)
        self._open = {}
        return True

    def refit(self) -> None:
        """Fit all rows anew, and weigh optional terms where there are enough new rows; frozen fits stay."""
        if self.frozen or len(self.rows) < len(self.terms):
            return
        rows = self.rows
        sample = Sample(rows.features, rows.busy_s, rows.weights, self._columns.reach(self.phase))
        if self._settings.optional_terms and len(self.rows) >= max(12, _GROWTH * self._weighed_at):
            self._weighed_at = len(self.rows)
            base, columns = _BASE[self.phase], sample.features.shape[1]
            self.terms = choose_terms(sample, base, [range(len(base), len(base) + 1), range(len(base) + 1, columns)])
        self.coefficients = fit(sample, self.terms)
        self.fitted_rows = len(self.rows)

    def _begin_anew(self) -> None:
        """Learn again from what comes; the coefficients stay until there are enough rows, but are nobody's first choice
        to borrow."""
        self.frozen, self.fitted_rows = False, 1
        self.rows = Rows(self._columns.count(self.phase), self._settings.rows_kept)
        self.errors.clear()
        self._open = {}

    def adopt(self, coefficients: Matrix, terms: tuple[int, ...], rows: int) -> None:
        """Take a fit that was frozen elsewhere on `rows` rows."""
        self.coefficients, self.terms, self.fitted_rows, self.frozen = coefficients, terms, rows, True
        self.saw_media = self.phase is Phase.PREFILL and MEDIA in terms

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
