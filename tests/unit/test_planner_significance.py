"""When a gain is more than chance."""

import numpy as np
import pytest

from services.planner.core.significance import corrected_test, plain_test


def test_the_plain_rule_is_two_standard_errors() -> None:
    [passes, fails] = plain_test(np.array([[0.1, 0.2, 0.3], [-0.1, 0.2, 0.1]]), 2.0)
    assert passes.mean == pytest.approx(0.2)
    assert passes.stderr == pytest.approx(0.1 / np.sqrt(3))
    assert passes.threshold == pytest.approx(2 * passes.stderr)
    assert (passes.passes, fails.passes) == (True, False)


def test_chance_alone_passes_rarely_however_many_candidates() -> None:
    draw = np.random.default_rng(0)
    plain = wrong = 0
    for _ in range(400):
        gains = draw.normal(0.0, 0.05, (8, 10))
        plain += any(test.passes for test in plain_test(gains, 2.0))
        wrong += any(test.passes for test in corrected_test(gains, 2.0, 0.05, 0.0))
    assert plain > 60
    assert wrong < 32


def test_a_real_gain_is_found_and_a_small_one_left() -> None:
    draw = np.random.default_rng(1)
    gains = np.stack([draw.normal(mean, 0.01, 10) for mean in (0.1, 0.015, -0.2)])
    assert [test.passes for test in corrected_test(gains, 2.0, 0.05, 0.02)] == [True, False, False]


def test_slices_that_drift_together_count_for_less() -> None:
    drifting = np.array([[0.0, 0.01, 0.02, 0.03, 0.05, 0.06, 0.07, 0.08]])
    shuffled = drifting[:, [3, 7, 0, 5, 2, 6, 1, 4]]
    [slow], [fast] = (corrected_test(gains, 2.0, 0.05, 0.0) for gains in (drifting, shuffled))
    assert slow.mean == pytest.approx(fast.mean)
    assert slow.stderr > 1.5 * fast.stderr


def test_a_gain_without_any_spread_passes_the_least_effect_only() -> None:
    same = np.full((2, 3), 0.05)
    same[1] = 0.01
    assert [test.passes for test in corrected_test(same, 2.0, 0.05, 0.02)] == [True, False]
