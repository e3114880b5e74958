"""Reading branch traces ("btrace"): ids, lengths and times of an agent's requests, no text.

Line 1 is the header of Dynamo's `dynamo.agentic_mooncake` v2, then one row per request. See data/traces/README.md.
"""

import gzip
import itertools
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")
SCHEMA = "dynamo.agentic_mooncake"


class TraceError(Exception):
    """A file that is not a branch trace; the text names file, line and what was expected."""


class Operation(StrEnum):
    ROOT = "root"
    APPEND = "append"
    FORK = "fork"
    SUBAGENT = "subagent"
    COMPACT = "compact"


class Dependency(msgspec.Struct, frozen=True):
    """This request starts `delay_ms` after `request_id` was answered."""

    request_id: str
    delay_ms: float
    relation: str = "sequence"
    trigger: str = "completion"


class ContextRecipe(msgspec.Struct, frozen=True):
    """The block ids of a prompt: the first `keep` of `base` (default: the branch's previous request), then runs."""

    keep: int
    add: list[tuple[int, int]]
    base: str | None = None


class Row(msgspec.Struct, frozen=True):
    """One recorded request; lengths in tokens, times in milliseconds."""

    request_id: str
    play_id: str
    session_id: str
    input_length: int
    output_length: int
    dependencies: list[Dependency]
    ctx: ContextRecipe
    op: Operation
    version: int = 0
    not_before_ms: float = 0
    kind: str | None = None
    parent_session_id: str | None = None
    end: bool = False
    stop: str = ""
    prefix_class: str | None = None
    prefix_blocks: int = 0

    @property
    def starts_after(self) -> list[Dependency]:
        """What it waits for; where nothing is recorded, the request whose context its own begins with."""
        if self.dependencies or self.ctx.base is None:
            return self.dependencies
        return [Dependency(self.ctx.base, 0.0)]


class Play(msgspec.Struct, frozen=True):
    """One recorded agent: its rows in order of their recorded start."""

    id: str
    rows: list[Row]


class Header(msgspec.Struct, frozen=True):
    schema: str
    version: int
    block_size: int


class Trace(msgspec.Struct, frozen=True):
    """All agents of a file; blocks of the recording have `block_size` tokens."""

    block_size: int
    plays: list[Play]


def read_trace(path: Path, limit_plays: int | None = None) -> Trace:
    """Read a trace (`.gz` or plain), at most `limit_plays` agents; TraceError names what is wrong."""
    try:
        lines = _lines(path)
        header = _decoded(msgspec.json.Decoder(Header), next(lines, (1, b"")), path)
        if header.schema != SCHEMA or header.version != 2:
            raise TraceError(f"{path}: header is {header.schema} v{header.version}, expected {SCHEMA} v2")
        decoder = msgspec.json.Decoder(Row)
        rows = (_decoded(decoder, line, path) for line in lines)
        grouped = itertools.groupby(rows, key=lambda row: row.play_id)
        plays = [Play(key, list(group)) for key, group in itertools.islice(grouped, limit_plays)]
    except (OSError, EOFError) as error:
        raise TraceError(f"{path}: {error}") from error
    for play in plays:
        _check(play, path)
    return Trace(header.block_size, plays)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def _decoded(decoder: msgspec.json.Decoder[T], line: tuple[int, bytes], path: Path) -> T:
    try:
        return decoder.decode(line[1])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}, line {line[0]}: {error}") from error


def _check(play: Play, path: Path) -> None:
    """Dependencies and bases are earlier rows of the same agent."""
    seen: set[str] = set()
    for row in play.rows:
        wanted = {dependency.request_id for dependency in row.dependencies}
        if row.ctx.base is not None:
            wanted.add(row.ctx.base)
        if missing := wanted - seen:
            raise TraceError(f"{path}: {row.request_id} refers to {sorted(missing)[0]}, which is no earlier request")
        seen.add(row.request_id)
