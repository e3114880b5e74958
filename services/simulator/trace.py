"""Branch traces as the simulator plays them: per agent its turns, with what each one's prompt is made of.

A turn *goes on* from its base when it keeps all of the
base's prompt but at most two blocks: then its prompt holds the base's prompt, the answer, and new tokens.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from services.btrace import Row, read_trace

TAIL_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class Turn:
    """One recorded request. `after`: (turn, delay in seconds) it waits for; `add`: runs (first id, count) of blocks.

    `base`: the turn whose prompt it starts from, `keep` blocks of it; `goes_on`: it contains the base's answer too.
    `heir`: the first turn that goes on from this one.
    """

    branch: str
    parent: str | None
    op: str
    version: int
    prompt_tokens: int
    output_tokens: int
    not_before_s: float
    after: tuple[tuple[int, float], ...]
    base: int | None
    keep: int
    goes_on: bool
    add: list[tuple[int, int]]
    last: bool
    prefix_class: str | None
    prefix_blocks: int
    heir: int | None = None


@dataclass(frozen=True, slots=True)
class Play:
    """One recorded agent. `ids`: block ids run from 0 below it. `unblocks`: per turn the turns that wait for it."""

    id: str
    turns: list[Turn]
    ids: int
    unblocks: list[list[tuple[int, float]]]


@dataclass(frozen=True, slots=True)
class Trace:
    """All agents of a file; blocks have `block_tokens` tokens."""

    block_tokens: int
    plays: list[Play]


@lru_cache(maxsize=8)
def load_trace(path: Path) -> Trace:
    """Read a trace (`.gz` or plain); TraceError names what is wrong. Read once per process."""
    trace = read_trace(path)
    return Trace(trace.block_size, [_play(play.id, play.rows, trace.block_size) for play in trace.plays])


def _play(name: str, rows: list[Row], block: int) -> Play:
    number = {row.request_id: i for i, row in enumerate(rows)}
    last_of = {row.session_id: i for i, row in enumerate(rows)}
    bases, goes_on, heirs = _bases(rows, number, block)
    unblocks: list[list[tuple[int, float]]] = [[] for _ in rows]
    turns: list[Turn] = []
    for i, row in enumerate(rows):
        after = tuple([(number[d.request_id], d.delay_ms / 1e3) for d in row.starts_after])
        for waits_for, delay_s in after:
            unblocks[waits_for].append((i, delay_s))
        turns.append(
            Turn(
                branch=row.session_id,
                parent=row.parent_session_id,
                op=row.op,
                version=row.version,
                prompt_tokens=row.input_length,
                output_tokens=row.output_length,
                not_before_s=row.not_before_ms / 1e3,
                after=after,
                base=bases[i],
                keep=row.ctx.keep,
                goes_on=i in goes_on,
                add=row.ctx.add,
                last=row.end or last_of[row.session_id] == i,
                prefix_class=row.prefix_class,
                prefix_blocks=row.prefix_blocks,
                heir=heirs.get(i),
            )
        )
    return Play(name, turns, _top(rows), unblocks)


def _bases(rows: list[Row], number: dict[str, int], block: int) -> tuple[list[int | None], set[int], dict[int, int]]:
    """Per row its base; the rows that go on from theirs; the first that goes on from each."""
    previous: dict[str, int] = {}
    bases: list[int | None] = []
    goes_on: set[int] = set()
    heirs: dict[int, int] = {}
    for i, row in enumerate(rows):
        base = number[row.ctx.base] if row.ctx.base is not None else previous.get(row.session_id)
        bases.append(base)
        previous[row.session_id] = i
        if base is None or row.op not in ("append", "fork"):
            continue
        if row.ctx.keep >= rows[base].input_length // block - TAIL_BLOCKS:
            goes_on.add(i)
            heirs.setdefault(base, i)
    return bases, goes_on, heirs


def _top(rows: list[Row]) -> int:
    return 1 + max((first + count for row in rows for first, count in row.ctx.add), default=0)
