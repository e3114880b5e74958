"""One trace for two simulators: branches of a recorded trace as sessions, for Dynamo's replay and for ours.

A session is one recorded branch: its requests one after the other, each so long after the answer before it. A branch
of an agent begins when its turn among the sessions comes, not when its parent opened it: the Mooncake format knows no
dependencies between sessions. It ends before its first prompt above `most_tokens`.
"""

import itertools
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from services.simulator.call import Call
from services.simulator.clock import Agenda
from services.simulator.contexts import Contexts, KeySpace
from services.simulator.trace import Play, Trace

Runs = tuple[tuple[int, int], ...]
"""Keys as (first, how many)."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a session. `prompt`: keys of its full blocks, `answer`: keys of those that end in its answer.

    `pause_s`: since the answer before, 0 for the first.
    """

    pause_s: float
    prompt_tokens: int
    output_tokens: int
    prompt: Runs
    answer: Runs


@dataclass(frozen=True, slots=True)
class Session:
    """One branch. `agent`: whose it is."""

    name: str
    agent: str
    asks: tuple[Ask, ...]


def sessions_of(trace: Trace, count: int, *, most_tokens: int, max_pause_s: float) -> list[Session]:
    """The first `count` branches in the order in which they begin in the file; pauses capped.

    After the last agent the first comes again, as another agent: it shares no more than the prefix of its class.
    """
    space = KeySpace()
    found = (
        session
        for start, play in enumerate(itertools.cycle(trace.plays))
        for session in _of_play(play, f"{play.id}.{start}", space, trace.block_tokens, most_tokens, max_pause_s)
    )
    return list(itertools.islice(found, count))


def _of_play(
    play: Play, agent: str, space: KeySpace, block: int, most_tokens: int, max_pause_s: float
) -> Iterator[Session]:
    contexts = Contexts(play, space, block)
    branches: dict[str, list[Ask]] = {}
    ended: set[str] = set()
    for number, turn in enumerate(play.turns):
        prompt, answer = runs_of(contexts.prompt(number)), runs_of(contexts.answer(number))
        asks = branches.setdefault(turn.branch, [])
        if turn.prompt_tokens + turn.output_tokens > most_tokens:
            ended.add(turn.branch)
        if turn.branch in ended:
            continue
        pause_s = min(max_pause_s, max((delay for _, delay in turn.after), default=0.0)) if asks else 0.0
        asks.append(Ask(pause_s, turn.prompt_tokens, max(1, turn.output_tokens), prompt, answer))
    for branch, asks in branches.items():
        if asks:
            yield Session(f"{agent}/{branch}", agent, tuple(asks))


def runs_of(keys: "array[int]") -> Runs:
    """Consecutive keys as runs."""
    if not keys:
        return ()
    found = np.frombuffer(keys, dtype=np.uint64)
    starts = [0, *(np.flatnonzero(found[1:] != found[:-1] + np.uint64(1)) + 1).tolist()]
    ends = [*starts[1:], len(keys)]
    return tuple((keys[start], end - start) for start, end in zip(starts, ends, strict=True))


def keys_of(runs: Runs) -> "array[int]":
    """The keys of runs."""
    keys = array("Q")
    for first, count in runs:
        keys.extend(range(first, first + count))
    return keys


def write_mooncake(sessions: Sequence[Session], block_tokens: int, path: Path) -> None:
    """Write Dynamo's multi-turn Mooncake rows: an id per block, the prompt's unfilled last block under one of its own.

    Sessions begin in the order of their first time stamps, which a closed loop does not look at otherwise.
    """
    spare = 1 + max(first + count for session in sessions for ask in session.asks for first, count in ask.prompt)
    with path.open("w") as file:
        for number, session in enumerate(sessions):
            for position, ask in enumerate(session.asks):
                ids = keys_of(ask.prompt).tolist()
                if ask.prompt_tokens % block_tokens:
                    ids.append(spare)
                    spare += 1
                row = {
                    "session_id": session.name,
                    "input_length": ask.prompt_tokens,
                    "output_length": ask.output_tokens,
                    "hash_ids": ids,
                    **({"delay": 1e3 * ask.pause_s} if position else {"timestamp": number}),
                }
                file.write(json.dumps(row, separators=(",", ":")) + "\n")


class Loop:
    """A closed loop of `width` sessions in our simulator: the next begins when one has ended, as in Dynamo's replay.

    `answered` must be called with each answer. Requests ask for one token more than recorded: the first comes from
    prefill here, while the replay's decode workers compute all of them.
    """

    def __init__(
        self, sessions: Sequence[Session], width: int, agenda: Agenda, arrive: Callable[[Call, float], None]
    ) -> None:
        self._sessions, self._agenda, self._arrive = sessions, agenda, arrive
        self._next = self._sent = 0
        self._open: dict[str, tuple[int, int]] = {}
        self._ended: dict[int, float] = {}
        for _ in range(width):
            self._agenda.at(0.0, self._begin)

    def _begin(self, now: float) -> None:
        if self._next < len(self._sessions):
            self._next += 1
            self._send(self._next - 1, 0, now)

    def _send(self, number: int, position: int, now: float) -> None:
        session = self._sessions[number]
        ask = session.asks[position]
        self._sent += 1
        call = Call(
            id=f"r{self._sent}",
            agent=session.agent,
            branch=session.name,
            parent=None,
            kind="append" if position else "root",
            version=0,
            turn=position,
            keys=keys_of(ask.prompt),
            output_keys=keys_of(ask.answer),
            prompt_tokens=ask.prompt_tokens,
            output_tokens=ask.output_tokens + 1,
            media=0,
            last=position == len(session.asks) - 1,
            arrived_at=now,
            pause_s=now - self._ended[number] if position else None,
        )
        self._open[call.id] = number, position
        self._arrive(call, now)

    def answered(self, call: Call, now: float) -> None:
        """The session goes on after its pause, or another begins."""
        number, position = self._open.pop(call.id)
        asks = self._sessions[number].asks
        if position + 1 == len(asks):
            self._begin(now)
            return
        self._ended[number] = now
        self._agenda.at(now + asks[position + 1].pause_s, lambda at: self._send(number, position + 1, at))
