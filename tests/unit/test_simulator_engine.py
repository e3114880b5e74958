"""The engine in virtual time against iteration by iteration arithmetic."""

import math
from array import array
from itertools import pairwise

import pytest

from services.engine.core.batching import PrefillWork
from services.engine.core.timing import Coefficients, DecodeTerms, PrefillTerms, attention_pairs
from services.simulator.call import Call
from services.simulator.clock import Agenda
from services.simulator.engine import Engine, Prefilling

TIMES = Coefficients(c0=0.1, c1=1e-5, c2=1e-10, d0=0.01, d1=0.005, d2=0.001, d3=0.05, active_share=1 / 32, fed_tokens=4)
ACCEPTED = 2.5


def call(name: str, prompt: int, output: int) -> Call:
    return Call(
        name, "a", name, None, "root", 0, 0, array("Q"), array("Q"), prompt, output, 0, last=True, arrived_at=0.0
    )


class Owner:
    def __init__(self) -> None:
        self.prefilled: dict[str, float] = {}
        self.decoded: dict[str, float] = {}
        self.decode_s = self.iterations = 0.0

    def prefill_begins(self, item: Prefilling, now: float) -> float:
        return 0.0

    def prefill_done(self, item: Prefilling, now: float) -> None:
        self.prefilled[item.call.id] = now

    def decode_done(self, call: Call, now: float) -> None:
        self.decoded[call.id] = now

    def prefill_iterated(self, terms: PrefillTerms, cached_tokens: int, duration_s: float, now: float) -> None:
        pass

    def decode_iterated(
        self, iterations: int, requests: int, context_tokens: float, duration_s: float, now: float
    ) -> None:
        self.iterations += iterations
        self.decode_s += duration_s


def stepped(joins: list[tuple[float, Call]]) -> dict[str, float]:
    """Decode alone, one iteration at a time: requests join at the next boundary."""
    waiting = sorted(joins, key=lambda join: join[0])
    running: list[list[object]] = []
    now, done = 0.0, dict[str, float]()
    while waiting or running:
        if not running:
            now = max(now, waiting[0][0])
        while waiting and waiting[0][0] <= now + 1e-9:
            _, came = waiting.pop(0)
            running.append([came, math.ceil((came.output_tokens - 1) / ACCEPTED), float(came.prompt_tokens)])
        context = sum(float(str(entry[2])) for entry in running)
        now += TIMES.decode_s(DecodeTerms(len(running), int(context)))
        for entry in running:
            entry[1] = int(str(entry[1])) - 1
            entry[2] = float(str(entry[2])) + ACCEPTED
        for entry in [entry for entry in running if entry[1] == 0]:
            running.remove(entry)
            assert isinstance(entry[0], Call)
            done[entry[0].id] = now
    return done


@pytest.mark.parametrize(
    "joins",
    [
        [(0.0, ("a", 1000, 200))],
        [(0.0, ("a", 100_000, 300)), (0.4137, ("b", 50_000, 120)), (0.55, ("c", 7, 40))],
        [(0.0, ("a", 10, 3)), (0.001, ("b", 10, 3)), (3.0, ("c", 90_000, 500)), (3.001, ("d", 10, 2))],
    ],
)
def test_rows_of_iterations_are_what_single_ones_are(joins: list[tuple[float, tuple[str, int, int]]]) -> None:
    agenda, owner = Agenda(), Owner()
    engine = Engine(agenda, owner, TIMES, ACCEPTED, 16_384, 256)
    calls = [(at, call(*what)) for at, what in joins]
    for at, came in calls:
        agenda.at(at, lambda now, came=came: engine.decode(came, now))  # type: ignore[misc]
    agenda.run(1000.0)
    expected = stepped(calls)
    assert owner.decoded.keys() == expected.keys()
    for name, at in expected.items():
        assert owner.decoded[name] == pytest.approx(at, rel=1e-4)
    engine.check()


def test_prefill_is_chunked_and_batched() -> None:
    agenda, owner = Agenda(), Owner()
    engine = Engine(agenda, owner, TIMES, ACCEPTED, 1000, 256)
    engine.prefill(Prefilling(call("long", 5000, 1), PrefillWork(5000, 2500)), 0.0)
    engine.prefill(Prefilling(call("short", 400, 1), PrefillWork(400, 0)), 0.0)
    agenda.run(100.0)
    first = TIMES.prefill_s(PrefillTerms(1, 1000, attention_pairs(1000, 2500)))
    second = TIMES.prefill_s(PrefillTerms(1, 1000, attention_pairs(1000, 3500)))
    mixed = attention_pairs(500, 4500) + attention_pairs(400, 0)
    third = TIMES.prefill_s(PrefillTerms(2, 900, mixed))
    assert owner.prefilled == pytest.approx({"long": first + second + third, "short": first + second + third})


def test_phases_get_equal_time() -> None:
    """While both have work, decode runs as long after each prefill iteration as that took."""
    agenda, owner = Agenda(), Owner()
    engine = Engine(agenda, owner, TIMES, ACCEPTED, 1000, 256)
    engine.decode(call("d", 1000, 10_000), 0.0)
    for number in range(5):
        engine.prefill(Prefilling(call(f"p{number}", 1000, 1), PrefillWork(1000, 0)), 0.0)
    agenda.run(2.0)
    prefill_s = TIMES.prefill_s(PrefillTerms(1, 1000, attention_pairs(1000, 0)))
    decode_s = TIMES.decode_s(DecodeTerms(1, 1000))
    gaps = [later - before for before, later in pairwise(owner.prefilled.values())]
    assert len(gaps) == 4
    assert gaps == pytest.approx([2 * prefill_s] * 4, abs=2 * decode_s)
    engine.check()


def test_a_running_call_leaves_at_a_boundary_and_goes_on_elsewhere() -> None:
    agenda, owner, left = Agenda(), Owner(), list[int]()
    here, there = (Engine(agenda, owner, TIMES, ACCEPTED, 1000, 256) for _ in range(2))
    moved = call("m", 1000, 501)
    here.decode(moved, 0.0)

    def over(iterations: int, now: float) -> None:
        left.append(iterations)
        there.resume(moved, iterations, now)

    agenda.at(1.0, lambda now: here.leave(moved, over, now))
    agenda.run(100.0)
    assert 0 < left[0] < 200
    assert owner.iterations == 200
    assert owner.decoded.keys() == {"m"}
    here.check()
    there.check()


def test_requests_in_decode_are_told_by_the_tokens_they_have_given() -> None:
    agenda, owner = Agenda(), Owner()
    engine = Engine(agenda, owner, TIMES, ACCEPTED, 8192, 64)
    seen: list[list[int]] = []
    agenda.at(0.0, lambda now: engine.decode(call("long", 1000, 2000), now))
    agenda.at(1.0, lambda now: engine.decode(call("short", 1000, 8), now))
    for moment in (0.0, 0.5, 1.0, 5.0):
        agenda.at(moment, lambda now: seen.append(engine.decoding_by_length(now)))
    agenda.run(5.0)
    begun, later, joined, alone = seen
    assert sum(begun) == sum(later) == sum(alone) == 1
    assert joined[0] == 1, "the one that joins has its first token"
    assert sum(joined) == 2
    lengths = [2 ** (len(counts) - 1) for counts in (begun, later, alone)]
    iteration_s = TIMES.decode_s(DecodeTerms(1, 1000))
    assert lengths[0] <= 1 + ACCEPTED
    assert lengths[1] <= 1 + ACCEPTED * (0.5 / iteration_s + 1) < 4 * lengths[1]
    assert lengths[2] > lengths[1]
