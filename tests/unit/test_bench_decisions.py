"""What bench.decisions times is a decision."""

import pytest

from bench import decisions
from services.planner.core.decide import Choice, choose


def test_it_times_a_decision_over_every_split_and_a_routing(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Choice] = []
    monkeypatch.setattr(decisions, "choose", lambda *given: made.append(choose(*given)))
    decisions.decide()(0)
    assert len(made[0].verdicts) > decisions.NODES / 2
    assert all(verdict.throughput_rps for verdict in made[0].verdicts)
    decisions.route()(0)
