"""Rates between nodes: learned from what was seen, sane whatever was seen."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.core.fetch_rates import FetchRates
from services.router.core.placement import FetchCost

DEFAULT = FetchCost(1e6, 0.002)
INDEX = {"a": 0, "b": 1, "c": 2}


def test_the_rate_of_a_pair_comes_out_and_others_keep_the_default() -> None:
    rates = FetchRates(DEFAULT)
    for tokens in (2000, 16_000, 4000, 8000):
        rates.observe("a", "b", tokens, 0.002 + tokens / 2e5)
    assert rates.cost("a", "b").tokens_per_s == pytest.approx(2e5)
    assert rates.cost("b", "a") == rates.cost("a", "c") == DEFAULT
    per_second, latency = rates.row("a", INDEX)
    assert list(per_second) == pytest.approx([1e6, 2e5, 1e6])  # type: ignore[arg-type]
    assert latency == 0.002
    assert rates.row("c", INDEX) == (1e6, 0.002)


def test_small_fetches_on_a_busy_machine_say_nothing() -> None:
    rates = FetchRates(DEFAULT)
    for _ in range(9):
        rates.observe("a", "b", 16, 0.3)
    assert rates.cost("a", "b") == DEFAULT


def test_a_pair_is_believed_after_a_few_and_stuck_fetches_are_left_out() -> None:
    rates = FetchRates(DEFAULT)
    rates.observe("a", "b", 2000, 0.5)
    rates.observe("a", "b", 2000, 900.0)
    assert rates.cost("a", "b") == DEFAULT
    rates.forget("b")
    for _ in range(2):
        rates.observe("a", "b", 2000, 0.5)
    assert rates.cost("a", "b") == DEFAULT


def test_what_changed_is_learned_anew() -> None:
    rates = FetchRates(DEFAULT)
    for tokens in (2000, 5000) * 10:
        rates.observe("a", "b", tokens, tokens / 1e6)
    for tokens in (2000, 5000) * 20:
        rates.observe("a", "b", tokens, 0.002 + tokens / 2e5)
    assert rates.cost("a", "b").tokens_per_s == pytest.approx(2e5, rel=0.05)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-5, 10**7), st.floats(-1, 1e5)), max_size=40))
def test_costs_stay_positive(seen: list[tuple[int, float]]) -> None:
    rates = FetchRates(DEFAULT)
    for tokens, seconds in seen:
        rates.observe("a", "b", tokens, seconds)
        rates.check()
        assert rates.cost("a", "b").seconds(1000) >= 0
