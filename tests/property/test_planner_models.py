"""Iteration models: what was put in comes out, useless terms stay away, warm-up ends as it should."""

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.iteration_model import IterationModel
from schemas.phase import Phase
from schemas.telemetry import Iteration, IterationBatch
from services.planner.core.iteration_model import LearnedModels
from services.planner.core.options import ModelSettings
from services.planner.core.regression import Sample, choose_terms, fit

TRUE = IterationModel(
    node="a", c0=0.1, c1=3e-5, c2=2e-10, c3=2e-7, d0=0.006, d1=0.013, d2=0.0004, experts_per_token=8, experts=256
)


def prefill(draw: random.Random, true: IterationModel, noise: float = 0.0) -> Iteration:
    tokens, cached, restored = draw.randint(50, 8000), draw.randint(0, 150_000), draw.randint(0, 50_000)
    pairs = tokens * cached + tokens * (tokens + 1) / 2
    seconds = true.c0 + true.c1 * tokens + true.c2 * pairs + true.c3 * restored + true.c5 * max(0, tokens - true.u0)
    return Iteration(
        t=0.0,
        seq=0,
        phase=Phase.PREFILL,
        duration_s=seconds * draw.uniform(1 - noise, 1 + noise),
        requests=1,
        uncached_tokens=tokens,
        attention_pairs=pairs,
        restored_tokens=restored,
        cached_tokens=cached,
    )


def decode(
    draw: random.Random, true: IterationModel, noise: float = 0.0, *, least: int = 1, most: int = 64
) -> Iteration:
    running, fed = draw.randint(least, most), 4
    context = running * draw.randint(1000, 150_000)
    phi = 1 - (1 - true.expert_share) ** (fed * running)
    seconds = true.d0 + true.d1 * phi + true.d2 * running + true.d3 * context / 1e6
    return Iteration(
        t=0.0,
        seq=0,
        phase=Phase.DECODE,
        duration_s=seconds * draw.uniform(1 - noise, 1 + noise),
        requests=running,
        context_tokens=context,
        fed_tokens=fed * running,
        accepted_tokens=2 * running,
    )


def learned(true: IterationModel, seconds: int, noise: float = 0.0, nodes: tuple[str, ...] = ("a",)) -> LearnedModels:
    """`seconds` of warm-up on nodes that run both phases."""
    draw, models = random.Random(1), LearnedModels(ModelSettings())
    for node in nodes:
        models.hello(node, true.experts_per_token, true.experts)
    for second in range(seconds):
        for node in nodes:
            both = [prefill(draw, true, noise) for _ in range(2)] + [decode(draw, true, noise) for _ in range(20)]
            models.iterations(IterationBatch(node=node, incarnation=1, iterations=both), second)
        models.advance(second + 1.0, nodes)
    models.check()
    return models


def test_the_coefficients_that_made_the_times_come_out() -> None:
    [found] = learned(TRUE, 60).models(["a"])
    for name in ("c0", "c1", "c2", "c3", "d0", "d1", "d2"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.02), name
    assert (found.c5, found.d3) == (0.0, pytest.approx(0.0, abs=1e-5))
    assert found.fed_tokens == 4.0
    assert found.prefill_error is not None
    assert found.prefill_error < 1e-3


def test_terms_that_matter_are_kept() -> None:
    true = IterationModel(**{**_fields(TRUE), "c1": 0.0, "c5": 4e-5, "u0": 2048, "d3": 0.004})
    [found] = learned(true, 90, noise=0.02).models(["a"])
    assert found.u0 == 2048
    assert found.c5 == pytest.approx(4e-5, rel=0.1)
    assert found.d3 == pytest.approx(0.004, rel=0.1)


def _fields(model: IterationModel) -> dict[str, object]:
    return {name: getattr(model, name) for name in model.__struct_fields__}


@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_noise_is_not_taken_for_a_term(noise: float) -> None:
    [found] = learned(TRUE, 120, noise).models(["a"])
    assert found.c5 * 4000 < 0.02 * (found.c0 + found.c1 * 4000)
    assert found.d3 < 2e-4


def test_warm_up_ends_when_the_newest_rows_are_predicted_well() -> None:
    early, done = learned(TRUE, 50, noise=0.02), learned(TRUE, 75, noise=0.02)
    assert early.warming_up
    assert not early.models(["a"])[0].frozen
    assert not done.warming_up
    assert done.models(["a"])[0].frozen
    assert not done.late


def test_warm_up_goes_on_while_a_node_is_not_predicted_well_and_ends_late() -> None:
    models = learned(TRUE, 200, noise=0.5)
    assert models.warming_up
    draw = random.Random(2)
    models.iterations(IterationBatch(node="a", incarnation=1, iterations=[decode(draw, TRUE)]), 1900.0)
    models.advance(1901.0, ["a"])
    assert not models.warming_up
    assert models.late


def run_on(models: LearnedModels, made: Callable[[random.Random], Iteration], seconds: int) -> None:
    """So many seconds more of one kind of iteration on node a."""
    draw, start = random.Random(3), 1000.0 if models.frozen_at is None else models.frozen_at + 100.0
    for second in range(seconds):
        batch = IterationBatch(node="a", incarnation=1, iterations=[made(draw) for _ in range(5)])
        models.iterations(batch, start + second)
        models.advance(start + second + 1.0, ["a"])
    models.check()


def test_what_was_frozen_is_not_fitted_again_while_it_is_good() -> None:
    models = learned(TRUE, 75)
    [before] = models.models(["a"])
    run_on(models, lambda draw: prefill(draw, TRUE, 0.05), 60)
    [after] = models.models(["a"])
    assert [getattr(after, name) for name in ("c0", "c1", "c2", "c3", "prefill_windows")] == (
        [getattr(before, name) for name in ("c0", "c1", "c2", "c3", "prefill_windows")]
    )
    assert after.prefill_error is not None
    assert after.prefill_error > 0.01, "but its error is seen"


def test_a_node_that_works_elsewhere_than_in_warm_up_learns_on_and_others_borrow_that() -> None:
    """A minute with one to four requests in decode does not tell d1 from d2: at 64 it is off by a third."""
    draw, models = random.Random(1), LearnedModels(ModelSettings())
    true = IterationModel(**{**_fields(TRUE), "d0": 0.006, "d1": 0.013, "d2": 0.0004, "d3": 0.001})
    for second in range(75):
        for node in ("a", "b"):
            models.hello(node, 8, 256)
            both = [prefill(draw, true, 0.02), *(decode(draw, true, 0.05, most=4) for _ in range(5))]
            models.iterations(IterationBatch(node=node, incarnation=1, iterations=both), second)
        models.advance(second + 1.0, ["a", "b"])
    assert not models.warming_up
    before = models.models(["a"])[0]
    run_on(models, lambda draw: decode(draw, true, least=40), 60)
    a, b = models.models(["a", "b"])
    assert abs(at_64(before) / at_64(true) - 1) > 0.07
    assert at_64(a) == at_64(b) == pytest.approx(at_64(true), rel=0.03)
    assert (a.borrowed, b.borrowed, a.frozen) == ([], ["decode"], True)
    assert a.decode_error is not None
    assert a.decode_error < 0.07


def at_64(model: IterationModel) -> float:
    """A decode iteration of 64 requests with 100,000 tokens each."""
    phi = 1 - (1 - 8 / 256) ** (4 * 64)
    return model.d0 + model.d1 * phi + model.d2 * 64 + model.d3 * 6.4


def test_a_planner_goes_on_with_the_models_of_the_one_before() -> None:
    published = learned(TRUE, 75).models(["a"])
    again = LearnedModels(ModelSettings())
    again.adopt(published, 0.0)
    [found] = again.models(["a"])
    assert (found.c0, found.c2, found.d1, found.frozen) == (
        published[0].c0,
        published[0].c2,
        published[0].d1,
        True,
    )
    assert not again.warming_up
    [newcomer] = again.models(["b"])
    assert newcomer.borrowed == ["prefill", "decode"]
    assert newcomer.d1 == published[0].d1


def test_a_split_that_stays_teaches_each_node_its_own_phase() -> None:
    draw, models = random.Random(1), LearnedModels(ModelSettings())
    for second in range(90):
        for node, make in (("p", prefill), ("d", decode)):
            models.hello(node, 8, 256)
            batch = IterationBatch(node=node, incarnation=1, iterations=[make(draw, TRUE) for _ in range(5)])
            models.iterations(batch, second)
        models.advance(second + 1.0, ["p", "d"])
    assert not models.warming_up
    on_p, on_d = models.models(["p", "d"])
    assert (on_p.borrowed, on_d.borrowed) == (["decode"], ["prefill"])
    assert on_p.d1 == on_d.d1 == pytest.approx(TRUE.d1, rel=0.02)


finite = st.floats(1e-6, 1e3)


@given(st.lists(st.tuples(finite, finite, finite), min_size=4, max_size=60), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_coefficients_are_never_negative_whatever_the_rows(
    rows: list[tuple[float, float, float]], draw: random.Random
) -> None:
    features = np.array([[1.0, a, b, 0.0] for a, b, _ in rows])
    busy_s = np.array([seconds for *_, seconds in rows])
    sample = Sample(features, busy_s, np.ones(len(rows)), np.zeros(4))
    coefficients = fit(sample, (0, 1, 3))
    assert (coefficients >= 0).all()
    assert coefficients[3] == 0.0
    assert choose_terms(sample, (0, 1), [(2, 3)]) in ((0, 1), (0, 1, 2))
