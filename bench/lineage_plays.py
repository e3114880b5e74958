"""Recorded agents in virtual time: who asks for which blocks when, the same in every run whatever the cache does.

A request takes one second and 20 ms a token of its answer; an agent that is done makes room for the next one.
"""

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.btrace import Play, Row, Trace

Indices = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]
FIRST_TOKEN_S, TOKEN_S = 1.0, 0.02
CLASS_BLOCKS = 8192
_A, _B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_A_INVERSE, _B_INVERSE = (np.uint64(pow(int(value), -1, 1 << 64)) for value in (_A, _B))


def keys_of(blocks: Indices) -> Keys:
    """Keys that look like hashes: splitmix64's finaliser of the numbers."""
    found: Keys = blocks.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    found = (found ^ (found >> np.uint64(30))) * _A
    found = (found ^ (found >> np.uint64(27))) * _B
    return found ^ (found >> np.uint64(31))


def blocks_of(keys: Keys) -> Indices:
    """The inverse of `keys_of`."""
    found = _unshifted(keys, 31) * _B_INVERSE
    found = _unshifted(found, 27) * _A_INVERSE
    return (_unshifted(found, 30) - np.uint64(0x9E3779B97F4A7C15)).astype(np.int64)


def _unshifted(value: Keys, shift: int) -> Keys:
    found = value
    for _ in range(64 // shift):
        found = value ^ (found >> np.uint64(shift))
    return found


@dataclass(frozen=True, slots=True)
class Request:
    """One request: `blocks` are the numbers of its prompt's full blocks, `last`: its branch ends with it."""

    number: int
    row: Row
    branch: str
    parent: str | None
    blocks: Indices
    last: bool


class Numbering:
    """Numbers for blocks, unique in the run; the leading blocks of a class of agents are the same for all of them."""

    def __init__(self) -> None:
        self.used = 1
        self._classes: dict[str, int] = {}

    def of_play(self, play: Play) -> dict[str, Indices]:
        """The numbers of the recorded blocks of each request, by request id."""
        ids: dict[str, Indices] = {}
        previous: dict[str, str] = {}
        for row in play.rows:
            base = row.ctx.base or previous.get(row.session_id)
            kept = ids[base][: row.ctx.keep] if base is not None else np.empty(0, dtype=np.int64)
            runs = [np.arange(first, first + count, dtype=np.int64) for first, count in row.ctx.add]
            ids[row.request_id] = np.concatenate([kept, *runs])
            previous[row.session_id] = row.request_id
        numbers = self._numbers(1 + max(int(found.max(initial=0)) for found in ids.values()))
        for row in play.rows:
            if row.prefix_class is not None:
                first = self._of_class(row.prefix_class)
                shared = ids[row.request_id][: min(row.prefix_blocks, CLASS_BLOCKS)]
                numbers[shared] = first + np.arange(len(shared))
        return {request: numbers[found] for request, found in ids.items()}

    def _numbers(self, count: int) -> Indices:
        first, self.used = self.used, self.used + count
        return np.arange(first, first + count, dtype=np.int64)

    def _of_class(self, name: str) -> int:
        if name not in self._classes:
            self._classes[name] = self.used
            self.used += CLASS_BLOCKS
        return self._classes[name]


class _Running:
    """One agent: its blocks, and what each request still waits for."""

    def __init__(self, play: Play, numbering: Numbering) -> None:
        self.rows = {row.request_id: row for row in play.rows}
        self.blocks = numbering.of_play(play)
        self.waits = {row.request_id: len(row.starts_after) for row in play.rows}
        self.ready = dict.fromkeys(self.waits, 0.0)
        self.then: dict[str, list[tuple[str, float]]] = {}
        for row in play.rows:
            for dependency in row.starts_after:
                self.then.setdefault(dependency.request_id, []).append((row.request_id, dependency.delay_ms / 1e3))
        last = {row.session_id: row.request_id for row in play.rows}
        self.last = set(last.values())
        self.left = len(play.rows)


@dataclass(frozen=True, slots=True)
class Moment:
    """A request arrives (`ended` False) or its answer is complete."""

    at: float
    request: Request
    ended: bool


def moments(trace: Trace, agents: int) -> Iterator[Moment]:
    """All arrivals and ends in order of time, `agents` agents at a time, each recorded one played once."""
    numbering, order, number = Numbering(), itertools.count(), itertools.count()
    waiting = iter(trace.plays)
    heap: list[tuple[float, int, _Running, str, Request | None]] = []

    def begin(at: float) -> None:
        play = next(waiting, None)
        if play is not None:
            running = _Running(play, numbering)
            for row in play.rows:
                if not running.waits[row.request_id]:
                    heapq.heappush(heap, (at + row.not_before_ms / 1e3, next(order), running, row.request_id, None))

    for agent in range(agents):
        begin(10.0 * agent)
    while heap:
        at, _, running, name, request = heapq.heappop(heap)
        row = running.rows[name]
        if request is None:
            blocks = running.blocks.pop(name)[: row.input_length // trace.block_size]
            request = Request(next(number), row, row.session_id, row.parent_session_id, blocks, name in running.last)
            yield Moment(at, request, ended=False)
            took_s = FIRST_TOKEN_S + TOKEN_S * row.output_length
            heapq.heappush(heap, (at + took_s, next(order), running, name, request))
            continue
        yield Moment(at, request, ended=True)
        running.left -= 1
        for after, delay_s in running.then.get(name, ()):
            running.waits[after] -= 1
            running.ready[after] = max(running.ready[after], at + delay_s)
            if not running.waits[after]:
                heapq.heappush(heap, (running.ready[after], next(order), running, after, None))
        if not running.left:
            begin(at)


def peak_demand(trace: Trace, agents: int) -> tuple[int, int]:
    """(most blocks that active branches have between them at a time, numbers used)."""
    most = distinct = 0
    counts = np.zeros(1 << 16, dtype=np.int32)
    contexts: dict[str, Indices] = {}
    top = 0
    for moment in moments(trace, agents):
        if not moment.ended:
            continue
        blocks, branch = moment.request.blocks, moment.request.branch
        top = max(top, int(blocks.max(initial=0)))
        while top >= len(counts):
            counts = np.concatenate([counts, np.zeros_like(counts)])
        distinct += int((counts[blocks] == 0).sum())
        counts[blocks] += 1
        most = max(most, distinct)
        former = contexts.pop(branch, None)
        if not moment.request.last:
            contexts[branch] = blocks
        for gone in (former, blocks if moment.request.last else None):
            if gone is not None:
                counts[gone] -= 1
                distinct -= int((counts[gone] == 0).sum())
    return most, top + 1
