"""The ledger never drifts, whatever is booked, moved and freed in which order."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.phase import Phase
from services.router.core.load import Booking, Ledger

NODES = ("a", "b", "c")
BOOKINGS = st.lists(
    st.builds(
        Booking,
        st.sampled_from((Phase.PREFILL, Phase.DECODE)),
        st.sampled_from(NODES),
        st.floats(0, 100),
        st.integers(0, 10_000),
        st.none() | st.floats(0, 50),
    ),
    max_size=2,
    unique_by=lambda booking: booking.phase,
)
STEPS = st.lists(
    st.tuples(st.sampled_from("rstuvw"), BOOKINGS, st.sampled_from(NODES), st.integers(0, 20), st.booleans()),
    max_size=60,
)


@settings(deadline=None, max_examples=100)
@given(STEPS)
def test_ledger_equals_the_sum_of_what_is_open(steps: list[tuple[str, list[Booking], str, int, bool]]) -> None:
    ledger, open_ = Ledger(), dict[str, list[Booking]]()
    for request, bookings, node, legs, shared in steps:
        ledger.set(request, bookings)
        open_[request] = bookings
        ledger.heartbeat(node, legs, legs // 2, shared=shared)
        ledger.check()
        for name in NODES:
            mine = [b for found in open_.values() for b in found if b.node == name]
            waiting = [b for b in mine if b.phase is Phase.PREFILL and b.started is None]
            foreign = ledger.wait(name, 1e9)[1] - sum(b.service_s for b in waiting)
            assert foreign == pytest.approx(0.0, abs=1e-9)
            assert ledger.decoding(name)[1] == sum(b.tokens for b in mine if b.phase is Phase.DECODE)
    for request in open_:
        ledger.set(request, [])
    for name in NODES:
        ledger.heartbeat(name, 0, 0, shared=True)
        assert ledger.wait(name, 0.0) == (0.0, 0.0)
        assert ledger.decoding(name) == (0, 0)
        assert ledger.open_legs(name) == 0


def test_running_batch_counts_what_is_left_of_it() -> None:
    ledger = Ledger()
    ledger.set("r", [Booking(Phase.PREFILL, "n", service_s=2.0, started=10.0)])
    ledger.set("s", [Booking(Phase.PREFILL, "n", service_s=3.0)])
    assert ledger.wait("n", 10.5) == (1.5, 3.0)
    assert ledger.wait("n", 99.0) == (0.0, 3.0)


def test_requests_of_other_routers_count_by_their_mean() -> None:
    ledger = Ledger()
    ledger.set("r", [Booking(Phase.PREFILL, "n", service_s=1.0)])
    for _ in range(200):
        ledger.served(0.5, 100)
    ledger.heartbeat("n", legs=5, decoding=1, shared=True)
    assert ledger.wait("n", 0.0)[1] == pytest.approx(1.0 + 3 * 0.5, rel=1e-3)
    assert ledger.decoding("n")[0] == 1
    ledger.heartbeat("n", legs=5, decoding=1, shared=False)
    assert ledger.wait("n", 0.0)[1] == 1.0
