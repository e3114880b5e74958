"""Branch traces as the simulator plays them: per agent its turns, with what each one's prompt is made of.

The same format as `ei replay` reads (data/traces/README.md). A turn *goes on* from its base when it keeps all of the
base's prompt but at most two blocks: then its prompt holds the base's prompt, the answer, and new tokens.
"""

import gzip
import itertools
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
    last_of = {row.session_id: i for i, row in enumerate(rows)}
    bases, goes_on, heirs = _bases(rows, number, block)
    unblocks: list[list[tuple[int, float]]] = [[] for _ in rows]
    turns: list[Turn] = []
    for i, row in enumerate(rows):
        after = tuple([(number[d.request_id], d.delay_ms / 1e3) for d in row.dependencies])
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


def _bases(rows: list[_Row], number: dict[str, int], block: int) -> tuple[list[int | None], set[int], dict[int, int]]:
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


def _top(rows: list[_Row]) -> int:
    return 1 + max((first + count for row in rows for first, count in row.ctx.add), default=0)
