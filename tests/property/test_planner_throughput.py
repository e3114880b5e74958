"""Theta and the closed loop against the formulas they stand for, written out one by one."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.iteration_model import IterationModel
from services.planner.core.closed_loop import solve
from services.planner.core.demand import attention_pairs
from services.planner.core.throughput import NodeLimits, NodeTimes, Works, theta
from tests.planner_world import GLM

LIMITS = NodeLimits(8192, 256, 2_900_000)


def works(
    t_uc: float = 5268,
    t_c: float = 150_000,
    t_out: float = 850,
    q: float = 30.0,
    agents: float = 112,
    think_s: float = 12.9,
    spread: float = 1.0,
    media: float = 0.0,
) -> Works:
    """One slice; requests are half small, half large, so that the square of their size has `spread`."""
    off = min(0.9, math.sqrt(spread))
    sizes = [t_uc * (1 - off), t_uc * (1 + off)]
    features = np.array([(1.0, size, attention_pairs(size, t_c), t_c, media) for size in sizes])
    moments = (features[:, :, None] * features[:, None, :]).mean(axis=0)
    one = np.ones(1)
    pairs = moments[0, 2]
    return Works(
        t_uc * one,
        t_c * one,
        pairs * one,
        media * one,
        t_out * one,
        2.5 * one,
        q * one,
        moments[None],
        one,
        agents * one,
        think_s * one,
        one,
    )


def fleet(*models: IterationModel) -> NodeTimes:
    return NodeTimes.of(models, [LIMITS] * len(models))


def split(prefill: int, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    mask = np.array([[1.0] * prefill + [0.0] * (nodes - prefill)])
    return mask, 1.0 - mask


def node(**changes: object) -> IterationModel:
    fields = {name: getattr(GLM, name) for name in GLM.__struct_fields__}
    return IterationModel(**{**fields, **changes})


@given(
    st.integers(2, 8),
    st.data(),
    st.floats(100, 20_000),
    st.floats(0, 200_000),
    st.floats(10, 4000),
    st.floats(0.5, 300),
    st.floats(0.5, 2.0),
)
@settings(max_examples=60, deadline=None)
def test_theta_is_the_smaller_of_both_sums(
    nodes: int, data: st.DataObject, t_uc: float, t_c: float, t_out: float, q: float, slower: float
) -> None:
    prefill = data.draw(st.integers(1, nodes - 1))
    models = [node(c1=GLM.c1 * slower**at, uncached_per_iteration=t_uc * 2, restored_share=0.5) for at in range(nodes)]
    work = works(t_uc, t_c, t_out, q, spread=0.0)
    pairs = float(work.pairs[0])
    mu_p = sum(1 / (m.c0 * t_uc / (2 * t_uc) + m.c1 * t_uc + m.c2 * pairs + m.c3 * 0.5 * t_c) for m in models[:prefill])
    running = q / (nodes - prefill)
    mu_d = 0.0
    for m in models[prefill:]:
        phi = 1 - (1 - m.expert_share) ** (m.fed_tokens * running)
        context = t_uc + t_c + t_out / 2
        iteration_s = m.d0 + m.d1 * phi + m.d2 * running + m.d3 * running * context / 1e6
        mu_d += running / (t_out / 2.5 * iteration_s)
    found = theta(fleet(*models), work, *split(prefill, nodes))
    assert float(found[0, 0]) == pytest.approx(min(mu_p, mu_d), rel=1e-9)


@given(
    st.integers(1, 8),
    st.floats(200, 12_000),
    st.floats(0, 180_000),
    st.floats(20, 3000),
    st.floats(4, 400),
    st.floats(0.1, 60),
)
@settings(max_examples=80, deadline=None)
def test_the_closed_loop_accounts_for_every_agent(
    prefill: int, t_uc: float, t_c: float, t_out: float, agents: float, think_s: float
) -> None:
    work = works(t_uc, t_c, t_out, agents=agents, think_s=think_s)
    found = solve(fleet(*[GLM] * 9), work, *split(prefill, 9))
    rate, running = float(found.rate[0, 0]), float(found.running[0, 0])
    there = rate * (think_s + float(found.ttft_s[0, 0])) + running * (9 - prefill)
    assert there == pytest.approx(agents, rel=1e-3)
    assert 0 < running <= float(found.room[0, 0])
    assert float(found.prefill_load[0, 0]) <= 1.0
    assert float(found.ttft_p95_s[0, 0]) >= float(found.ttft_s[0, 0]) > 0


def test_more_agents_never_give_less_throughput_and_wait_longer() -> None:
    rates, waits = [], []
    for agents in (10, 40, 80, 120, 200, 400):
        found = solve(fleet(*[GLM] * 9), works(agents=agents), *split(3, 9))
        rates.append(float(found.rate[0, 0]))
        waits.append(float(found.ttft_s[0, 0]))
    assert rates == sorted(rates)
    assert waits == sorted(waits)


def test_pictures_take_their_time_from_prefill_in_both_formulas() -> None:
    times, per_request = fleet(*[node(c4=1.3)] * 9), 2.6
    plain, shown = works(spread=0.0), works(spread=0.0, media=2.0)
    assert times.request_s(shown) == pytest.approx(times.request_s(plain) + per_request)
    mine = fleet(*[node(c0=GLM.c0, c1=GLM.c1 + per_request / 5268)] * 9)
    for split_of in (split(3, 9), split(6, 9)):
        with_pictures, as_tokens = solve(times, shown, *split_of), solve(mine, plain, *split_of)
        assert with_pictures.rate == pytest.approx(as_tokens.rate, rel=1e-6)
        assert with_pictures.ttft_s == pytest.approx(as_tokens.ttft_s, rel=1e-6)


def test_the_published_splits_are_found_from_the_published_coefficients() -> None:
    """GLM-5.2, 9 nodes: the reference settled on 3P6D or 4P5D for Claude Code, on 1P8D or 2P7D for Putnam."""
    masks = np.array([[1.0] * p + [0.0] * (9 - p) for p in range(1, 9)])
    for work, expected in (
        (works(agents=112, think_s=12.9, spread=0.8), {3, 4}),
        (works(agents=160, think_s=14.1, spread=0.8), {4, 5}),
        (works(800, 50_000, 1357, agents=224, think_s=10.0), {1, 2}),
    ):
        rate = solve(fleet(*[GLM] * 9), work, masks, 1.0 - masks).rate[:, 0]
        assert int(rate.argmax()) + 1 in expected, rate


def test_a_node_that_runs_both_phases_balances_them() -> None:
    both = np.ones((1, 2))
    work, times = works(), fleet(GLM, GLM)
    rate = float(theta(times, work, both, both)[0, 0])
    alone = 1.0 / float(times.request_s(work)[0, 0])
    assert 0 < rate < 2 * alone
