"""The planner on its own, driving a small simulated cluster."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.phase import Decision, Phase, Split
from services.planner.core.options import DecideSettings, ModelSettings
from services.planner.core.policy import Planner, PlannerSettings
from services.planner.core.windows import WindowSettings
from tests.planner_world import World

P, D, BOTH = Phase.PREFILL, Phase.DECODE, Phase.BOTH
WINDOW = WindowSettings(20.0, 6, 5.0)
QUICK = ModelSettings(warm_up_least_s=30.0)
CLAUDE_CODE, PUTNAM = (5268.0, 150_000.0, 850.0), (800.0, 50_000.0, 1357.0)


def planner(mode: str = "on", *, warm_up: bool = False, **decide: float | bool) -> Planner:
    chosen = DecideSettings(**decide)  # type: ignore[arg-type]
    return Planner(PlannerSettings(mode=mode, warm_up=warm_up, window=WINDOW, model=QUICK, decide=chosen), 0.0)


def world(prefill: int, nodes: int = 9, agents: int = 112, work: tuple[float, float, float] = CLAUDE_CODE) -> World:
    return World([P] * prefill + [D] * (nodes - prefill), agents, 12.0, work)


def decisions(cluster: World) -> list[Decision]:
    return [decided.decision for report in cluster.reports for decided in report.decided]


@pytest.mark.parametrize("prefill", [2, 6])
def test_it_finds_the_split_from_either_side_in_one_switch_and_stays(prefill: int) -> None:
    cluster, core = world(prefill), planner(early_slices=0)
    cluster.hello(core)
    cluster.run(core, 520)
    assert cluster.split in ("3P6D", "4P5D")
    assert len(cluster.orders) == 1
    first = next(decision for decision in decisions(cluster) if decision.applied)
    assert (first.split_now, first.split_new, first.kind) == (f"{prefill}P{9 - prefill}D", cluster.split, "window")
    assert len(first.verdicts) == 8
    assert first.mean is not None
    assert first.threshold is not None
    assert first.mean > first.threshold
    assert first.workload is not None
    assert first.workload.t_acc == pytest.approx(2.5, rel=0.05)
    last = decisions(cluster)[-1]
    assert (last.agents, last.think_s) == (pytest.approx(112, rel=0.1), pytest.approx(12.0, rel=0.1))
    assert [verdict.why for verdict in first.verdicts].count("chosen") == 1
    assert set(first.nodes) == {command.node for command in cluster.orders[0].commands}


@pytest.mark.parametrize(("mode", "said"), [("dry-run", True), ("off", False)])
def test_modes_that_order_nothing(mode: str, said: bool) -> None:
    cluster, core = world(6), planner(mode)
    cluster.hello(core)
    cluster.run(core, 130)
    assert cluster.split == "6P3D"
    assert [(d.split_new is not None, d.applied) for d in decisions(cluster)] == ([(True, False)] if said else [])


def test_warm_up_runs_both_phases_then_orders_the_initial_split() -> None:
    cluster, core = World([P, P, D, D], 40, 8.0, CLAUDE_CODE), planner(warm_up=True)
    cluster.hello(core)
    cluster.run(core, 3)
    assert cluster.split == "0P0D+4both"
    cluster.run(core, 300)
    kinds = [decision.kind for decision in decisions(cluster)]
    assert kinds[:2] == ["warm-up", "initial"]
    initial = decisions(cluster)[1]
    assert initial.split_new == "2P2D"
    assert len(initial.models) == 4
    assert all(model.frozen for model in initial.models)
    slices = [one.kind for report in cluster.reports for window in report.windows for one in window]
    assert slices[0] in ("switching", "warm-up")


def test_the_operators_word_ends_warm_up() -> None:
    cluster, core = World([P, P, D], 20, 8.0, CLAUDE_CODE), planner(warm_up=True)
    cluster.hello(core)
    cluster.run(core, 3)
    cluster.obey(core, core.order_split(Split(1, 2), "by hand", cluster.now))
    cluster.run(core, 100)
    assert cluster.split == "1P2D"
    assert [decision.kind for decision in decisions(cluster)] == ["warm-up"]


def test_a_planner_that_starts_goes_on_from_the_last_decision() -> None:
    cluster, first = world(6), planner()
    cluster.hello(first)
    cluster.run(first, 1)
    first.pin("n0", pinned=True)
    cluster.run(first, 130)
    last = decisions(cluster)[-1]
    again = planner("dry-run", warm_up=True)
    again.decision_seen(last, cluster.now)
    assert (again.mode, again.pinned) == ("on", {"n0"})
    assert not again.models.warming_up
    before = len(decisions(cluster))
    cluster.hello(again)
    cluster.run(again, 60)
    assert [d.kind for d in decisions(cluster)[before:]] in ([], ["window"])


@pytest.mark.parametrize(("early_slices", "kind"), [(4, "early"), (0, "window")])
def test_other_work_is_followed_before_the_window_ends(early_slices: int, kind: str) -> None:
    cluster, core = world(1, work=PUTNAM), planner(early_slices=early_slices)
    cluster.hello(core)
    cluster.run(core, 125)
    assert not cluster.orders
    cluster.work = CLAUDE_CODE
    cluster.run(core, 100)
    applied = [decision.kind for decision in decisions(cluster) if decision.applied]
    assert applied == (["early"] if early_slices else [])
    cluster.run(core, 145)
    assert next(decision for decision in decisions(cluster) if decision.applied).kind == kind
    assert cluster.split in ("3P6D", "4P5D", "5P4D")


def test_a_burst_of_two_slices_is_not_followed() -> None:
    cluster, core = world(1, work=PUTNAM), planner()
    cluster.hello(core)
    cluster.run(core, 125)
    cluster.work = CLAUDE_CODE
    cluster.run(core, 40)
    cluster.work = PUTNAM
    cluster.run(core, 200)
    assert not [d for d in decisions(cluster) if d.kind == "early"]


def test_the_operators_word_stands_until_the_next_window() -> None:
    cluster, core = world(4), planner(cooldown_s=0.0)
    cluster.hello(core)
    cluster.run(core, 125)
    cluster.obey(core, core.order_split(Split(8, 1), "by hand", cluster.now))
    cluster.run(core, 110)
    assert cluster.split == "8P1D"
    cluster.run(core, 125)
    assert cluster.split != "8P1D"


@pytest.mark.parametrize(("drain_wait_s", "held"), [(30.0, False), (600.0, True)])
def test_an_answer_that_goes_on_for_long_does_not_hold_the_planner(drain_wait_s: float, held: bool) -> None:
    cluster, core = world(2, work=PUTNAM), planner(early_slices=0, drain_wait_s=drain_wait_s)
    cluster.hello(core)
    cluster.run(core, 60)
    core.order_phase("n8", P, "never carried out", cluster.now)
    cluster.work = CLAUDE_CODE
    cluster.run(core, 310)
    said = [decision.why for decision in decisions(cluster) if decision.kind == "window"]
    assert all("a switch is under way" in why for why in said) == held
    assert any(decision.verdicts for decision in decisions(cluster)) != held


def test_what_a_switch_stranded_is_taken_back_within_half_a_minute() -> None:
    """Work becomes prefill-bound at the very moment prefill nodes were given away."""
    cluster, core = world(6, work=PUTNAM, agents=180), planner(early_slices=0)
    cluster.hello(core)
    cluster.run(core, 122)
    assert len(cluster.orders) == 1
    assert cluster.split in ("1P8D", "2P7D")
    switched_at, cluster.work = cluster.now, CLAUDE_CODE
    cluster.run(core, 60)
    reverts = [
        (report, decided.decision)
        for report in cluster.reports
        for decided in report.decided
        if decided.decision.kind == "revert"
    ]
    assert len(reverts) == 1
    assert cluster.split == "6P3D"
    taken_s = (cluster.reports.index(reverts[0][0]) + 1) - switched_at
    assert taken_s <= 30
    assert "undone on probation" in reverts[0][1].why


def test_nothing_is_ordered_within_the_cool_down() -> None:
    cluster, core = world(6), planner(cooldown_s=400.0)
    cluster.hello(core)
    core.decision_seen(Decision(id="x", t=0.0, split_now="5P4D", split_new="6P3D", applied=True, why="", mode="on"), 0)
    cluster.run(core, 245)
    assert [decision.applied for decision in decisions(cluster)] == [False, False]
    assert all("cool-down 400 s" in decision.why for decision in decisions(cluster))


@given(st.integers(1, 5), st.integers(2, 6), st.sets(st.integers(0, 5)), st.booleans(), st.booleans())
@settings(max_examples=8, deadline=None)
def test_no_phase_is_emptied_and_no_pinned_node_moved(
    prefill: int, nodes: int, pinned: set[int], closed_loop: bool, safe_switch: bool
) -> None:
    prefill = min(prefill, nodes - 1)
    cluster, core = world(prefill, nodes, 12 * nodes), planner(closed_loop=closed_loop, safe_switch=safe_switch)
    cluster.hello(core)
    cluster.run(core, 2)
    kept = {f"n{at}" for at in pinned if at < nodes}
    for name in kept:
        core.pin(name, pinned=True)
    cluster.run(core, 130)
    for order in cluster.orders:
        assert not {command.node for command in order.commands} & kept
        assert "0P" not in order.split_new
        assert "P0D" not in order.split_new
