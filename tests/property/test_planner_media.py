"""Media in the iteration model: their time is found where there are any, and nothing changes where there are none."""

import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.iteration_model import IterationModel
from schemas.phase import Phase, Split
from schemas.telemetry import Iteration, IterationBatch, RequestTelemetry
from services.planner.core.decide import Situation, choose
from services.planner.core.demand import Demand, attention_pairs
from services.planner.core.fleet import Node
from services.planner.core.iteration_model import LearnedModels
from services.planner.core.options import DecideSettings, ModelSettings
from services.planner.core.throughput import NodeLimits
from services.planner.core.windows import Slice, SliceKind
from tests.planner_world import GLM
from tests.property.test_planner_models import TRUE, decode, prefill

LEAST_S, T_ACC = 60.0, 2.5
PLAIN_RULE = DecideSettings(closed_loop=False, latency_slack=0.0, safe_switch=False)


def seen(draw: random.Random, true: IterationModel, pictures: int) -> Iteration:
    """A prefill iteration with at most so many pictures, each taking `c4`."""
    plain, media = prefill(draw, true, 0.02), draw.randint(0, pictures)
    return msgspec.structs.replace(plain, duration_s=plain.duration_s + true.c4 * media, media=media)


class WarmUp:
    """Seconds of iterations of nodes that run both phases. `counted`: engines say how many pictures there were."""

    def __init__(self, true: IterationModel, *nodes: str, counted: bool = True) -> None:
        self.draw, self.true, self.nodes, self.counted = random.Random(1), true, nodes, counted
        self.models, self.now = LearnedModels(ModelSettings(warm_up_least_s=LEAST_S)), 0.0
        for node in nodes:
            self.models.hello(node, true.experts_per_token, true.experts)

    def run(self, seconds: int, pictures: dict[str, int]) -> None:
        """`pictures`: how many an iteration of a node has at most."""
        for _ in range(seconds):
            for node in self.nodes:
                ran = [seen(self.draw, self.true, pictures[node]) for _ in range(2)]
                ran = ran if self.counted else [msgspec.structs.replace(one, media=0) for one in ran]
                ran += [decode(self.draw, self.true, 0.02) for _ in range(10)]
                self.models.iterations(IterationBatch(node=node, incarnation=1, iterations=ran), self.now)
            self.now += 1.0
            self.models.advance(self.now, self.nodes)
        self.models.check()

    def model(self, node: str = "a") -> IterationModel:
        [found] = self.models.models([node])
        return found


def with_pictures(**changes: object) -> IterationModel:
    return msgspec.structs.replace(TRUE, **changes)


@given(st.floats(0.1, 3.0), st.integers(1, 6))
@settings(max_examples=8, deadline=None)
def test_the_time_of_a_picture_comes_out_and_ends_warm_up(c4: float, pictures: int) -> None:
    warm_up = WarmUp(with_pictures(c4=c4), "a")
    warm_up.run(75, {"a": pictures})
    found = warm_up.model()
    assert found.c4 == pytest.approx(c4, rel=0.05)
    tokens = found.c1 * 6000 + found.c5 * max(0, 6000 - found.u0)
    assert tokens == pytest.approx(TRUE.c1 * 6000, rel=0.1)
    assert found.frozen
    assert not warm_up.models.late


def test_warm_up_does_not_end_while_nobody_counts_the_pictures() -> None:
    warm_up = WarmUp(with_pictures(c4=1.3), "a", counted=False)
    warm_up.run(180, {"a": 2})
    assert warm_up.models.warming_up
    assert warm_up.model().c4 == 0.0


def test_without_pictures_and_with_ones_that_cost_nothing_there_is_no_term() -> None:
    for pictures, most in ((0, 0.0), (3, 0.01 * TRUE.c0)):
        warm_up = WarmUp(TRUE, "a")
        warm_up.run(75, {"a": pictures})
        assert warm_up.model().c4 <= most
        assert warm_up.model().frozen


def test_pictures_and_a_knee_are_kept_together() -> None:
    warm_up = WarmUp(with_pictures(c4=0.5, c1=0.0, c5=4e-5, u0=2048), "a")
    warm_up.run(90, {"a": 3})
    found = warm_up.model()
    assert (found.c4, found.u0) == (pytest.approx(0.5, rel=0.05), 2048)
    assert found.c5 == pytest.approx(4e-5, rel=0.1)


def test_pictures_that_come_later_are_learned_then_and_other_nodes_take_their_time() -> None:
    warm_up = WarmUp(with_pictures(c4=1.3), "a", "b")
    warm_up.run(75, {"a": 0, "b": 0})
    before = warm_up.model("b")
    assert (before.frozen, before.c4) == (True, 0.0)
    warm_up.run(90, {"a": 2, "b": 0})
    a, b = warm_up.models.models(["a", "b"])
    assert a.c4 == b.c4 == pytest.approx(1.3, rel=0.05)
    assert msgspec.structs.replace(b, c4=0.0, uncached_per_iteration=None, prefill_error=None, decode_error=None) == (
        msgspec.structs.replace(before, uncached_per_iteration=None, prefill_error=None, decode_error=None)
    )
    assert a.prefill_error is not None
    assert a.prefill_error < 0.07
    again = LearnedModels(ModelSettings())
    again.adopt([a], 0.0)
    assert again.models(["a"])[0].c4 == a.c4


def demand(t_uc: int, t_c: int, t_out: int, media: int) -> Demand:
    made = Demand()
    for number in range(30):
        record = RequestTelemetry(
            id="t",
            t=0.0,
            request=str(number),
            branch=None,
            version=None,
            outcome="stop",
            t_arrive=float(number),
            t_end=number + 5.0,
            cached_tokens=t_c,
            uncached_tokens=t_uc,
            output_tokens=t_out,
            media=media,
        )
        made.add(record, 1.0)
    made.decode_steps, made.accepted = 100, round(100 * T_ACC)
    return made


def fleet(prefill_nodes: int, nodes: int) -> list[Node]:
    phases = [Phase.PREFILL] * prefill_nodes + [Phase.DECODE] * (nodes - prefill_nodes)
    return [Node(f"n{at}", phase, 0, 1, 0, 0, 0, 0, 0.0) for at, phase in enumerate(phases)]


def theta(true: IterationModel, split: Split, t_uc: int, t_c: int, t_out: int, media: int, q: float) -> float:
    """Requests per second of a split of equal nodes, written out."""
    mine = true.c0 + true.c1 * t_uc + true.c2 * attention_pairs(t_uc, t_c) + true.c3 * t_c + true.c4 * media
    running = q / split.decode
    phi = 1 - (1 - true.expert_share) ** (true.fed_tokens * running)
    context = (t_uc + t_c + t_out / 2) * running
    iteration_s = true.d0 + true.d1 * phi + true.d2 * running + true.d3 * context / 1e6
    return min(split.prefill / mine, split.decode * running / (t_out / T_ACC * iteration_s))


@given(
    st.integers(2, 9),
    st.data(),
    st.integers(200, 6000),
    st.integers(0, 100_000),
    st.integers(50, 1500),
    st.integers(0, 4),
    st.floats(0.1, 2.0),
    st.floats(2.0, 120.0),
)
@settings(max_examples=60, deadline=None)
def test_the_split_chosen_for_pictures_is_the_best_of_all(
    nodes: int, data: st.DataObject, t_uc: int, t_c: int, t_out: int, media: int, c4: float, q: float
) -> None:
    now = Split(data.draw(st.integers(1, nodes - 1)), 0)
    now = Split(now.prefill, nodes - now.prefill)
    true = msgspec.structs.replace(GLM, c4=c4, prefill_windows=1, decode_windows=1)
    work = demand(t_uc, t_c, t_out, media)
    known = Slice(0.0, SliceKind.KNOWN, work.requests, work.workload(), q, 2 * q, work)
    models = {node.name: msgspec.structs.replace(true, node=node.name) for node in fleet(1, nodes)}
    limits = {name: NodeLimits(8192, 256, 2_900_000) for name in models}
    slices = [replace(known, start=60.0 * at) for at in range(10)]
    found = choose(Situation(fleet(now.prefill, nodes), models, limits, frozenset(), slices, 60.0), PLAIN_RULE)
    splits = [Split(count, nodes - count) for count in range(1, nodes)]
    rates = {str(split): theta(true, split, t_uc, t_c, t_out, media, q) for split in splits}
    chosen = str(now) if found.chosen is None else str(found.chosen.split)
    assert rates[chosen] == pytest.approx(max(rates.values()), rel=1e-9)
    for verdict in found.verdicts:
        assert verdict.throughput_rps == pytest.approx(rates[verdict.split], rel=1e-9)


def test_a_slice_says_how_many_pictures_a_request_has() -> None:
    both = demand(100, 1000, 50, 2).plus(demand(100, 1000, 50, 1))
    workload = both.workload()
    assert workload is not None
    assert workload.media == 1.5
    assert np.allclose(demand(100, 1000, 50, 0).moments[4], 0.0)
