"""The fit of one phase of one node: iterations in, coefficients out; errors are those of rows not yet fitted."""

from collections import deque

import numpy as np

from schemas.phase import Phase
from schemas.telemetry import Iteration
from services.planner.core.model_rows import DECODE_TERMS, MEDIA, PREFILL_TERMS, Columns, Matrix, OpenRow, Rows
from services.planner.core.options import ModelSettings
from services.planner.core.regression import Sample, choose_terms, fit

_BASE = {Phase.PREFILL: range(len(PREFILL_TERMS) - 1), Phase.DECODE: range(len(DECODE_TERMS) - 1)}
_LEAST_ROWS = 12
"""So many rows are needed to weigh optional terms, or to give up coefficients that another planner has learned."""
_ANY = 64
"""An octave above all: an adopted fit does not say what it was learned from."""
_GROWTH = 0.25
"""Optional terms are weighed again when this share of the rows is new."""


class PhaseFit:
    """`coefficients` of all columns, None before the first fit. `errors`: relative errors of the newest rows, each
    predicted by the fit before it. `settled`: it was frozen once; it learns on while `frozen` is false. `largest`: the
    largest octave it has learned from. `saw_media`: it knows what media take, or learns it."""

    def __init__(self, phase: Phase, columns: Columns, settings: ModelSettings) -> None:
        self.phase, self._columns, self._settings = phase, columns, settings
        self.rows = Rows(columns.count(phase), settings.rows_kept)
        self.terms = tuple(_BASE[phase])
        self.coefficients: Matrix | None = None
        self.errors: deque[float] = deque(maxlen=settings.newest)
        self.frozen = self.settled = self.saw_media = False
        self.fitted_rows = self.largest = 0
        self.fed_tokens = 1.0
        self._open: dict[int, OpenRow] = {}
        self._since = 0.0
        self._added = self._weighed_at = self._learns_from = 0
        self._least_rows = len(self.terms)

    def add(self, iteration: Iteration, now: float) -> None:
        """An iteration of this phase; it joins the open row."""
        features = self._columns.of(iteration)
        if features is None:
            return
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
                self._learn(octave, row)
        self._open = {}
        return True

    def refit(self) -> None:
        """Fit all rows anew, and weigh optional terms where there are enough new rows; frozen fits stay."""
        if self.frozen or len(self.rows) < self._least_rows:
            return
        rows = self.rows
        sample = Sample(rows.features, rows.busy_s, rows.weights, self._columns.reach(self.phase))
        enough = self._weighed_at + _GROWTH * min(self._weighed_at, self._settings.rows_kept)
        if self._settings.optional_terms and self._added >= max(_LEAST_ROWS, enough):
            self._weighed_at = self._added
            base, columns = _BASE[self.phase], sample.features.shape[1]
            self.terms = choose_terms(sample, base, [range(len(base), len(base) + 1), range(len(base) + 1, columns)])
        self.coefficients = fit(sample, self.terms)
        self.fitted_rows = len(self.rows)

    def _learn(self, octave: int, row: OpenRow) -> None:
        self.rows.add(row.features, row.busy_s, octave)
        self._added += 1
        self.largest = max(self.largest, octave)
        self.saw_media = self.saw_media or (self.phase is Phase.PREFILL and row.features[MEDIA] > 0)

    def freeze(self) -> None:
        """It stays as it is while it is good."""
        self.frozen = self.settled = True

    def settle(self, least_rows: float) -> None:
        """After warm-up: a frozen fit that is off where its node works now learns on, from `least_rows` rows more at
        least; then it is frozen when it is good."""
        if self.error is None:
            return
        if self.frozen and not self.good:
            self.frozen, self._learns_from = False, self._added
        elif self.good and self._added - self._learns_from >= least_rows:
            self.freeze()

    def adopt(self, coefficients: Matrix, terms: tuple[int, ...], rows: int) -> None:
        """Take a fit that was frozen elsewhere on `rows` rows."""
        self.coefficients, self.terms, self.fitted_rows = coefficients, terms, rows
        self.saw_media = self.phase is Phase.PREFILL and MEDIA in terms
        self._least_rows, self.largest = _LEAST_ROWS, _ANY
        self.freeze()

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
