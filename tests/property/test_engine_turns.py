"""Equal time for both phases, whatever their iterations take."""

from hypothesis import given
from hypothesis import strategies as st

from services.engine.core.turns import Turns

SECONDS = st.floats(1e-4, 10.0)


@given(st.lists(SECONDS, min_size=5, max_size=50), st.lists(SECONDS, min_size=1, max_size=50))
def test_neither_phase_is_ahead_by_more_than_an_iteration_of_each(prefills: list[float], decodes: list[float]) -> None:
    turns, prefill_s, decode_s, number = Turns(), 0.0, 0.0, 0
    for prefill in prefills:
        while not turns.prefill_due(decoding=True):
            turns.decoded(decodes[number % len(decodes)])
            decode_s += decodes[number % len(decodes)]
            number += 1
        turns.prefilled(prefill)
        prefill_s += prefill
        assert prefill_s - decode_s <= max(prefills) + 1e-6
        assert decode_s - prefill_s <= len(prefills) * max(decodes)


@given(SECONDS)
def test_prefill_does_not_wait_for_a_phase_without_work(prefill: float) -> None:
    turns = Turns()
    turns.prefilled(prefill)
    assert not turns.prefill_due(decoding=True)
    assert turns.prefill_due(decoding=False)
    assert turns.prefill_due(decoding=True), "what was owed to nobody is forgotten"
