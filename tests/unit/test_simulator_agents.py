"""Agents of the simulator: those that begin midway are anywhere in their work, and do all that is left of it."""

from pathlib import Path

import pytest

from services.simulator.agents import Agents, Mix
from services.simulator.call import Call
from services.simulator.clock import Agenda
from services.simulator.trace import load_trace

TRACE = load_trace(Path("data/traces/cc_smoke.btrace.jsonl.gz"))
AGENTS = 40


def played(*, midway: bool, until: float, agents: int = AGENTS) -> list[Call]:
    """Calls of agents that are answered at once."""
    agenda, calls = Agenda(), list[Call]()

    def arrive(call: Call, now: float) -> None:
        calls.append(call)
        agenda.at(now, lambda at: made.answered(call, at))

    made = Agents(agenda, arrive, seed=1)
    made.add(Mix(TRACE, agents=agents, ramp_s=0.0, midway=midway))
    agenda.run(until)
    return calls


def first_turns(calls: list[Call]) -> list[int]:
    firsts: dict[str, int] = {}
    for call in calls:
        firsts.setdefault(call.agent, call.turn)
    return list(firsts.values())


def test_an_agent_begins_with_its_first_turn() -> None:
    assert set(first_turns(played(midway=False, until=0.0))) == {0}


def test_agents_found_midway_are_spread_over_their_work() -> None:
    firsts = first_turns(played(midway=True, until=0.0))
    assert len(firsts) >= AGENTS / 2
    assert len(set(firsts)) > AGENTS / 3


@pytest.mark.parametrize("midway", [False, True])
def test_an_agent_plays_all_that_is_left_and_is_replaced(midway: bool) -> None:
    calls = played(midway=midway, until=1e6, agents=3)
    turns: dict[str, list[int]] = {}
    for call in calls:
        turns.setdefault(call.agent, []).append(call.turn)
    assert len(turns) > 10
    for done in list(turns.values())[:5]:
        assert sorted(done) == list(range(min(done), min(done) + len(done)))
    assert all(min(done) == 0 for done in list(turns.values())[3:])
