"""Branch traces as the simulator plays them: per agent its turns, with what each one's prompt is made of.

The same format as `ei replay` reads (data/traces/README.md). A turn *goes on* from its base when it keeps all of the
base's prompt but at most two blocks: then its prompt holds the base's prompt, the answer, and new tokens.
"""

import gzip
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import msgspec

SCHEMA = "dynamo.agentic_mooncake"
TAIL_BLOCKS = 2


class TraceError(Exception):
    """A file that is not a branch trace; the text names file and what was expected."""


class _Dependency(msgspec.Struct, frozen=True):
    request_id: str
    delay_ms: float


class _Recipe(msgspec.Struct, frozen=True):
    keep: int
    add: list[tuple[int, int]]
    base: str | None = None


class _Row(msgspec.Struct, frozen=True):
    request_id: str
    play_id: str
    session_id: str
    input_length: int
    output_length: int
    dependencies: list[_Dependency]
    ctx: _Recipe
    op: str
    version: int = 0
    not_before_ms: float = 0
    parent_session_id: str | None = None
    end: bool = False
    prefix_class: str | None = None
    prefix_blocks: int = 0


class _Header(msgspec.Struct, frozen=True):
    schema: str
    version: int
    block_size: int


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
    add: tuple[tuple[int, int], ...]
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
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            header = msgspec.json.decode(file.readline(), type=_Header)
            if header.schema != SCHEMA or header.version != 2:
                raise TraceError(f"{path}: header is {header.schema} v{header.version}, expected {SCHEMA} v2")
            decoder = msgspec.json.Decoder(_Row)
            rows = (decoder.decode(line) for line in file if line.strip())
            groups = itertools.groupby(rows, key=lambda row: row.play_id)
            plays = [_play(name, list(group), header.block_size) for name, group in groups]
    except (OSError, EOFError, msgspec.MsgspecError, KeyError) as error:
        raise TraceError(f"{path}: {error}") from error
    return Trace(header.block_size, plays)


def _play(name: str, rows: list[_Row], block: int) -> Play:
    number = {row.request_id: i for i, row in enumerate(rows)}
    previous: dict[str, int] = {}
    turns: list[Turn] = []
    heirs: dict[int, int] = {}
    unblocks: list[list[tuple[int, float]]] = [[] for _ in rows]
    for i, row in enumerate(rows):
        base = number[row.ctx.base] if row.ctx.base is not None else previous.get(row.session_id)
        full = rows[base].input_length // block if base is not None else 0
        goes_on = base is not None and row.op in ("append", "fork") and row.ctx.keep >= full - TAIL_BLOCKS
        if goes_on and base is not None:
            heirs.setdefault(base, i)
        previous[row.session_id] = i
        after = tuple((number[d.request_id], d.delay_ms / 1e3) for d in row.dependencies)
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
                base=base,
                keep=row.ctx.keep,
                goes_on=goes_on,
                add=tuple((first, count) for first, count in row.ctx.add),
                last=row.end,
                prefix_class=row.prefix_class,
                prefix_blocks=row.prefix_blocks,
            )
        )
    return Play(name, list(_with_heirs(turns, heirs)), _top(rows), unblocks)


def _with_heirs(turns: list[Turn], heirs: dict[int, int]) -> Iterator[Turn]:
    last_of = {turn.branch: i for i, turn in enumerate(turns)}
    for i, turn in enumerate(turns):
        changed = {"heir": heirs.get(i), "last": turn.last or last_of[turn.branch] == i}
        yield Turn(**{name: changed.get(name, getattr(turn, name)) for name in Turn.__slots__})


def _top(rows: list[_Row]) -> int:
    return 1 + max((first + count for row in rows for first, count in row.ctx.add), default=0)
