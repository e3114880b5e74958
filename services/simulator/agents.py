"""Agents that play traces: a fixed number of them (a finished one is replaced at once) or so many a minute."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from services.simulator.call import Call
from services.simulator.clock import Agenda
from services.simulator.contexts import Contexts, KeySpace
from services.simulator.trace import Play, Trace

Arrive = Callable[[Call, float], None]


@dataclass(frozen=True, slots=True)
class Mix:
    """What agents play. `agents` of them at a time (closed loop) or `per_minute` new ones (open loop), from `since` on.

    `max_pause_s` caps recorded pauses, `output_scale` multiplies answers, `media`: every request carries a picture.
    `midway`: those that begin in the ramp are anywhere in their work, as in a cluster that has served for long.
    """

    trace: Trace
    agents: int = 0
    per_minute: float = 0.0
    max_pause_s: float | None = None
    output_scale: float = 1.0
    media: bool = False
    since: float = 0.0
    ramp_s: float = 600.0
    midway: bool = False


@dataclass(slots=True)
class _Agent:
    """One run of a play. `waits`: per turn, how many turns it still waits for and when it may start."""

    name: str
    play: Play
    contexts: Contexts
    group: _Group
    waits: list[int]
    ready_at: list[float]
    left: int
    ended_at: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Group:
    """The agents of one mix. `target`: how many there should be (closed loop); fewer: the finished are not replaced."""

    mix: Mix
    order: list[int]
    target: int
    running: int = 0
    next_play: int = 0


class Agents:
    """Starts agents and sends their requests; `answered` must be called with each answer."""

    def __init__(self, agenda: Agenda, arrive: Arrive, seed: int) -> None:
        self._agenda, self._arrive = agenda, arrive
        self._random = random.Random(seed)
        self._space = KeySpace()
        self._running: dict[str, _Agent] = {}
        self._open: dict[str, tuple[_Agent, int]] = {}
        self._started = self._sent = 0
        self.sessions: list[tuple[float, float]] = []
        """(start, end) of agents that have ended."""
        self._began: dict[str, float] = {}

    def add(self, mix: Mix) -> Callable[[int], None]:
        """Let agents of a mix begin. Returns how to change their number (closed loop)."""
        order = list(range(len(mix.trace.plays)))
        self._random.shuffle(order)
        group = _Group(mix, order, mix.agents)
        self._fill(group, mix.since, mix.ramp_s)
        if mix.per_minute:
            self._agenda.at(mix.since + self._gap(mix), lambda now: self._next_open(group, now))

        def resize(agents: int) -> None:
            group.target = agents
            self._fill(group, self._agenda.now, mix.ramp_s)

        return resize

    def _fill(self, group: _Group, since: float, ramp_s: float) -> None:
        while group.running < group.target:
            group.running += 1
            at = since + self._random.uniform(0.0, ramp_s)
            self._agenda.at(at, lambda now: self._begin(group, now, midway=group.mix.midway))

    def _gap(self, mix: Mix) -> float:
        return self._random.expovariate(mix.per_minute / 60.0)

    def _next_open(self, group: _Group, now: float) -> None:
        group.running += 1
        self._begin(group, now)
        self._agenda.at(now + self._gap(group.mix), lambda at: self._next_open(group, at))

    def _begin(self, group: _Group, now: float, *, midway: bool = False) -> None:
        """A new agent. One found midway through its work is the likelier of a play the longer that is."""
        plays = group.mix.trace.plays
        if midway:
            (play,) = self._random.choices(plays, weights=[len(play.turns) for play in plays])
        else:
            play = plays[group.order[group.next_play % len(group.order)]]
            group.next_play += 1
        self._started += 1
        agent = _Agent(
            name=f"a{self._started}",
            play=play,
            contexts=Contexts(play, self._space, group.mix.trace.block_tokens),
            group=group,
            waits=[len(turn.after) for turn in play.turns],
            ready_at=[now + turn.not_before_s for turn in play.turns],
            left=len(play.turns),
        )
        self._began[agent.name] = now
        skipped = self._random.randrange(len(play.turns)) if midway else 0
        agent.left -= skipped
        for number in range(skipped):
            for waiting, _ in play.unblocks[number]:
                agent.waits[waiting] -= 1
        for number in range(skipped, len(play.turns)):
            if not agent.waits[number]:
                not_before_s = 0.0 if skipped else play.turns[number].not_before_s
                self._plan(agent, number, now + not_before_s)

    def _plan(self, agent: _Agent, number: int, at: float) -> None:
        self._agenda.at(at, lambda now: self._send(agent, number, now))

    def _send(self, agent: _Agent, number: int, now: float) -> None:
        turn, mix = agent.play.turns[number], agent.group.mix
        self._sent += 1
        before = agent.ended_at.get(turn.branch)
        call = Call(
            id=f"r{self._sent}",
            agent=agent.name,
            branch=f"{agent.name}:{turn.branch}",
            parent=None if turn.parent is None else f"{agent.name}:{turn.parent}",
            kind=turn.op,
            version=turn.version,
            turn=number,
            keys=agent.contexts.prompt(number),
            output_keys=agent.contexts.answer(number),
            prompt_tokens=turn.prompt_tokens,
            output_tokens=max(1, round(turn.output_tokens * mix.output_scale)),
            media=int(mix.media),
            last=turn.last,
            arrived_at=now,
            pause_s=None if before is None else now - before,
        )
        self._open[call.id] = agent, number
        self._arrive(call, now)

    def answered(self, call: Call, now: float) -> None:
        """Go on: turns that waited for this one, or a new agent in the place of one that has ended."""
        agent, number = self._open.pop(call.id)
        group = agent.group
        agent.ended_at[agent.play.turns[number].branch] = now
        agent.left -= 1
        for waiting, delay_s in agent.play.unblocks[number]:
            if group.mix.max_pause_s is not None:
                delay_s = min(delay_s, group.mix.max_pause_s)
            agent.waits[waiting] -= 1
            agent.ready_at[waiting] = max(agent.ready_at[waiting], now + delay_s)
            if not agent.waits[waiting]:
                self._plan(agent, waiting, agent.ready_at[waiting])
        if not agent.left:
            self.sessions.append((self._began.pop(agent.name), now))
            group.running -= 1
            if group.running < group.target:
                group.running += 1
                self._begin(group, now)
