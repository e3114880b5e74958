"""Few slots are gone through one by one, many as arrays: both ways leave the same order behind."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.kvpool.core import eviction
from services.kvpool.core.eviction import REFERENCED, UNREACHABLE, EvictionOrder

SLOTS = 12
BITS = (0, REFERENCED, UNREACHABLE, REFERENCED | UNREACHABLE)
Step = tuple[str, list[int], int]

steps = st.lists(
    st.tuples(
        st.sampled_from(["touch", "hold", "unhold", "mark", "value", "rest"]),
        st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS, unique=True),
        st.integers(0, 255),
    ),
    max_size=30,
)


def left_behind(script: list[Step]) -> tuple[list[bytes], tuple[int, int, int], list[int]]:
    """The state after these steps, and the order in which everything then goes."""
    order = EvictionOrder(SLOTS)
    for slot in range(SLOTS):
        order.add(slot, None if slot % 4 == 0 else slot - 1, slot % 4, 0.0)
        order.ready(slot, 0.0)
    for now, (what, slots, value) in enumerate(script, 1):
        if what == "touch":
            order.touch(slots, float(now))
        elif what == "hold":
            order.hold(slots)
        elif what == "unhold":
            order.unhold([slot for slot in slots if order.holds[slot]])
        elif what == "mark":
            order.mark(slots, BITS[value % 4])
        else:
            order.value(slots, value, referenced=what == "value")
        order.check()
    held = [slot for slot in range(SLOTS) for _ in range(order.holds[slot])]
    state = [bytes(each) for each in (order.flags, order.keep, order.rest, order.last_used_s, order.holds)]
    counts = (order.held_blocks, order.referenced_blocks, order.unreachable_blocks)
    for slot in held:
        order.unhold([slot])
    gone: list[int] = []
    while (slot := order.pop()) is not None:
        gone.append(slot)
        order.remove(slot)
    return state, counts, gone


@settings(max_examples=150, deadline=None)
@given(steps)
def test_few_and_many_slots_are_treated_alike(script: list[Step]) -> None:
    few = left_behind(script)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eviction, "_FEW", 0)
        many = left_behind(script)
    assert few == many
    assert len(few[2]) == SLOTS
