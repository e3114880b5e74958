"""Which waiting prefill goes first: short ones pass long ones, and nobody waits for ever."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.phase import Phase
from services.engine.core.timing import Coefficients
from tests.engine_world import World, request

P, D = "node-0", "node-1"
TIMES = Coefficients(c0=0.0, c1=0.01)


def waiting(weight: float, arrivals: list[tuple[float, int, int]]) -> list[str]:
    """Names (their number) in queue order; (seconds after the one before, prompt tokens, cached tokens)."""
    world = World(P, D, order_weight=weight)
    core = world.nodes[P].core
    core.prefill.times = TIMES
    for number, (later, prompt, cached) in enumerate(arrivals):
        world.now += later
        leg = request(str(number), Phase.PREFILL, D, prompt=prompt)
        leg = msgspec.structs.replace(leg, cached_tokens=cached)
        core.serve(leg, world.now)
    return [leg.key.id for leg in core.table.in_order(Phase.PREFILL)]


def test_without_a_weight_first_come_is_first_served() -> None:
    assert waiting(0.0, [(0, 60, 0), (1, 5, 0), (1, 40, 0)]) == ["0", "1", "2"]


def test_a_short_one_passes_a_long_one_that_came_a_little_before() -> None:
    assert waiting(2.0, [(0, 60, 0), (0.2, 10, 0)]) == ["1", "0"]
    assert waiting(2.0, [(0, 60, 0), (1.2, 10, 0)]) == ["0", "1"]


def test_what_is_cached_does_not_count() -> None:
    assert waiting(2.0, [(0, 40, 0), (0.1, 60, 50)]) == ["1", "0"]


@settings(max_examples=60, deadline=None)
@given(
    st.floats(0, 5),
    st.lists(st.tuples(st.floats(0, 2), st.integers(1, 60), st.just(0)), min_size=2, max_size=12),
)
def test_nobody_is_passed_by_what_comes_later_than_its_own_multiple(
    weight: float, arrivals: list[tuple[float, int, int]]
) -> None:
    order = waiting(weight, arrivals)
    came, at = {}, 0.0
    for number, (later, prompt, _) in enumerate(arrivals):
        at += later
        came[str(number)] = (at, TIMES.c1 * prompt)
    for place, name in enumerate(order):
        arrived, predicted = came[name]
        for other in order[:place]:
            assert came[other][0] <= arrived + weight * predicted + 1e-9
