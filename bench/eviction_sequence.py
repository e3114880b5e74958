"""The one sequence of accesses that every policy replays: agents in a closed loop, unlimited cache, constant service.

A finished agent is replaced at once while there are others; what comes after the last one began is not scored.
"""

import heapq
import random
from collections import defaultdict
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bench.eviction_trace import FINISH, Blocks, Contexts, rows
from services.btrace import Row

NEVER = np.iinfo(np.int32).max
START_WITHIN_S = 600.0


class Access(NamedTuple):
    """A request begins (reads and completes its prompt) or ends (its answer is there). `blocks`: of prompt or context.
    `next_use`: of each of these blocks the number of the next access that begins and reads it, NEVER for none."""

    at_s: float
    begins: bool
    request: str
    branch: str
    parent: str | None
    row: Row
    prompt_blocks: int
    blocks: Blocks
    next_use: Blocks

    @property
    def finish(self) -> str:
        return FINISH.get(self.row.stop, "")


class Sequence(NamedTuple):
    """`scored_s`: from the end of warm-up until no agent was left to begin. `blocks`: numbers in use are below it."""

    name: str
    accesses: list[Access]
    scored_s: tuple[float, float]
    blocks: int
    agents: int
    tokens_per_block: int
    block_digests: npt.NDArray[np.uint64]

    def digests(self, blocks: Blocks) -> bytes:
        """Packed digests of these blocks."""
        return self.block_digests[blocks].tobytes()


class Loop:
    """Agents at work: a request follows the answers it depends on after the recorded wait, at most `longest_wait_s`."""

    def __init__(self, plays: list[list[Row]], agents: int, service_s: float, longest_wait_s: float, seed: int) -> None:
        order = list(range(len(plays)))
        random.Random(seed).shuffle(order)
        self._plays, self._waiting = plays, iter(order)
        self._service_s, self._longest_wait_s = service_s, longest_wait_s
        self._events: list[tuple[float, int, bool, int, int]] = []
        self._tie = count()
        self._left: dict[int, int] = {}
        self._needs: dict[tuple[int, int], int] = {}
        self._ready_s: dict[tuple[int, int], float] = defaultdict(float)
        self._heirs: dict[tuple[int, str], list[tuple[int, float]]] = defaultdict(list)
        self.dry_s: float | None = None
        starts = random.Random(seed + 1)
        for _ in range(agents):
            self._begin(starts.uniform(0.0, START_WITHIN_S))
        self.dry_s = None

    def _begin(self, now: float) -> None:
        number = next(self._waiting, None)
        if number is None:
            self.dry_s = now if self.dry_s is None else self.dry_s
            return
        play = self._plays[number]
        self._left[number] = len(play)
        for place, row in enumerate(play):
            after = row.starts_after
            self._needs[number, place] = len(after)
            for needed in after:
                self._heirs[number, needed.request_id].append((place, needed.delay_ms / 1000))
            if not after:
                self._push(now + row.not_before_ms / 1000, number, place, begins=True)

    def _push(self, at_s: float, number: int, place: int, *, begins: bool) -> None:
        heapq.heappush(self._events, (at_s, next(self._tie), begins, number, place))

    def run(self, until_s: float) -> list[tuple[float, bool, int, int]]:
        """(time, begins, play, turn) until no agent is left to begin, at most `until_s`."""
        happened: list[tuple[float, bool, int, int]] = []
        while self._events:
            now, _, begins, number, place = heapq.heappop(self._events)
            if now > until_s or self.dry_s is not None:
                return happened
            happened.append((now, begins, number, place))
            if begins:
                self._push(now + self._service_s, number, place, begins=False)
                continue
            for heir, delay_s in self._heirs.pop((number, self._plays[number][place].request_id), ()):
                self._needs[number, heir] -= 1
                wait_s = min(delay_s, self._longest_wait_s)
                self._ready_s[number, heir] = max(self._ready_s[number, heir], now + wait_s)
                if not self._needs[number, heir]:
                    self._push(self._ready_s[number, heir], number, heir, begins=True)
            self._left[number] -= 1
            if not self._left[number]:
                self._begin(now)
        return happened


def record(
    path: Path,
    *,
    trace: str,
    agents: int,
    tokens_per_block: int,
    service_s: float,
    longest_wait_s: float,
    warm_s: float,
    plays: slice | None = None,
    until_s: float = float("inf"),
    seed: int = 0,
) -> Sequence:
    """Play a trace and write down who reads and writes what when."""
    taken = rows(path)[plays or slice(None)]
    happened = Loop(taken, agents, service_s, longest_wait_s, seed).run(until_s)
    until_s = min(until_s, happened[-1][0])
    contexts = Contexts(tokens_per_block)
    played = {number: contexts.play(number, taken[number]) for number in sorted({event[2] for event in happened})}
    accesses: list[Access] = []
    following = np.full(len(contexts), NEVER, np.int32)
    for number in range(len(happened) - 1, -1, -1):
        at_s, begins, play, place = happened[number]
        turn = played[play][place]
        blocks = turn.prompt if begins else turn.context
        row = turn.row
        accesses.append(
            Access(
                at_s, begins, row.request_id, row.session_id, row.parent_session_id, row, len(turn.prompt), blocks,
                following[blocks],
            )
        )  # fmt: skip
        if begins:
            following[blocks] = number
    accesses.reverse()
    return Sequence(
        trace, accesses, (warm_s, until_s), len(contexts), agents, tokens_per_block, _digests(len(contexts))
    )


def _digests(blocks: int) -> npt.NDArray[np.uint64]:
    """32 bytes for each block number, all different (splitmix64)."""
    with np.errstate(over="ignore"):
        mixed = np.arange(1, 4 * blocks + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        mixed ^= mixed >> np.uint64(31)
    return mixed.reshape(blocks, 4)
