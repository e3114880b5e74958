"""Fits as they are published, and published ones taken up again."""

from typing import Any

import numpy as np

from schemas.iteration_model import IterationModel
from schemas.phase import Phase
from services.planner.core.model_rows import DECODE_TERMS, MEDIA, PREFILL_TERMS, Matrix
from services.planner.core.phase_fit import PhaseFit

_KNEES_FROM = len(PREFILL_TERMS)


def prefill_half(fit: PhaseFit, knee_tokens: tuple[int, ...]) -> dict[str, Any]:
    """The prefill fields of an `IterationModel`."""
    assert fit.coefficients is not None
    half: dict[str, Any] = {name: float(fit.coefficients[at]) for at, name in enumerate(PREFILL_TERMS)}
    for column in (term for term in fit.terms if term >= _KNEES_FROM):
        half |= {"c5": float(fit.coefficients[column]), "u0": knee_tokens[column - _KNEES_FROM]}
    return half | {"prefill_error": fit.error, "prefill_windows": fit.fitted_rows}


def decode_half(fit: PhaseFit) -> dict[str, Any]:
    """The decode fields of an `IterationModel`."""
    assert fit.coefficients is not None
    half: dict[str, Any] = {name: float(fit.coefficients[at]) for at, name in enumerate(DECODE_TERMS)}
    return half | {"fed_tokens": fit.fed_tokens, "decode_error": fit.error, "decode_windows": fit.fitted_rows}


def adopted(
    model: IterationModel, phase: Phase, knee_tokens: tuple[int, ...]
) -> tuple[Matrix, tuple[int, ...], int] | None:
    """(coefficients, terms, rows) of a published model's phase; None if it was borrowed or has a knee we do not try."""
    if phase.value in model.borrowed:
        return None
    if phase is Phase.DECODE:
        terms = (0, 1, 2, 3) if model.d3 else (0, 1, 2)
        return np.array((model.d0, model.d1, model.d2, model.d3)), terms, model.decode_windows
    if model.c5 and model.u0 not in knee_tokens:
        return None
    knees = [model.c5 if tokens == model.u0 else 0.0 for tokens in knee_tokens]
    coefficients = np.array((model.c0, model.c1, model.c2, model.c3, model.c4, *knees))
    optional = (column for column in range(MEDIA, len(coefficients)) if coefficients[column])
    return coefficients, (*range(MEDIA), *optional), model.prefill_windows
