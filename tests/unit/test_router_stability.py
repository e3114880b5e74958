"""Prompts that break at a changing place are told from those that grow, fork or are rewritten."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.core.stability import Break, Stability, change_at, common_units

TEXT = list(range(1000, 1400))
ONE, NOBODY = ("", "b"), ("", None)


def pack(tokens: list[int]) -> bytes:
    return array("I", tokens).tobytes()


def prompt(change: list[int], more: int = 0) -> bytes:
    """Ten tokens, what changes, and a long rest that grows."""
    return pack([*range(10), *change, *TEXT, *range(5000, 5000 + more)])


@pytest.mark.parametrize("key", [ONE, NOBODY])
def test_a_changing_token_is_reported_at_the_third_request_and_once(key: tuple[str, str | None]) -> None:
    stability = Stability()
    found = [stability.observe(key, prompt([7000 + turn], 20 * turn)) for turn in range(6)]
    assert found == [None, None, Break(10, pack([7001]), pack([7002])), None, None, None]
    stability.check()


def test_a_change_may_have_another_length_each_time() -> None:
    stability = Stability()
    changes = [[7000, 7001], [7002], [7003, 7004, 7005]]
    assert [stability.observe(ONE, prompt(change)) for change in changes][2] == Break(
        10, pack([7002]), pack([7003, 7004, 7005])
    )


def test_growing_forking_and_rewriting_are_no_breaks() -> None:
    stability = Stability()
    for turn in range(4):
        assert stability.observe(ONE, prompt([1], 50 * turn)) is None
    for turn in range(4):
        assert stability.observe(ONE, pack([*range(10), *range(90_000 + 1000 * turn, 90_800 + 1000 * turn)])) is None


def test_a_break_that_happened_once_is_not_reported() -> None:
    stability = Stability()
    calls = [prompt([1]), prompt([2]), prompt([2], 30), prompt([2], 60), prompt([3], 60), prompt([3], 90)]
    assert [stability.observe(ONE, call) for call in calls] == [None] * 6


@pytest.mark.parametrize("key", [ONE, NOBODY])
def test_side_requests_between_do_not_hide_it(key: tuple[str, str | None]) -> None:
    stability = Stability()
    found = []
    for turn in range(3):
        stability.observe(key, pack(list(range(20_000 + 300 * turn, 20_250 + 300 * turn))))
        found.append(stability.observe(key, prompt([7000 + turn])))
    assert found[2] is not None


units = st.lists(st.integers(0, 3), max_size=80)


@given(units, units)
def test_common_units_is_the_common_prefix(one: list[int], other: list[int]) -> None:
    same = common_units(pack(one), pack(other))
    assert one[:same] == other[:same]
    assert same == min(len(one), len(other)) or one[same] != other[same]
    found = change_at(pack(one), pack(other), same)
    if found is not None:
        a, b = len(found.before) // 4, len(found.now) // 4
        assert one[same + a : same + a + 32] == other[same + b : same + b + 32]


@given(st.lists(st.tuples(st.sampled_from(["a", "b", None]), units), max_size=30), st.integers(0, 400))
def test_what_is_kept_is_bounded(calls: list[tuple[str | None, list[int]]], limit: int) -> None:
    stability = Stability(limit_bytes=limit)
    for name, tokens in calls:
        stability.observe(("", name), pack(tokens))
        stability.check()
