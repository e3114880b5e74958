"""Recorded agents as chains of blocks, several of the recording's blocks to one of the bench's."""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.btrace import Row, read_trace

RECORDED_BLOCK = 64
FINISH = {"tool_use": "tool_calls", "end_turn": "stop"}
Blocks = npt.NDArray[np.int32]


class Turn(NamedTuple):
    """One request: the blocks of its prompt, and those of prompt and answer; ids are places in one tree of contexts."""

    row: Row
    prompt: Blocks
    context: Blocks


Play = list[Turn]


class Contexts:
    """Gives every block of every context a number: one for each chain of blocks up to it."""

    def __init__(self, tokens_per_block: int) -> None:
        self.fold = tokens_per_block // RECORDED_BLOCK
        self._children: dict[tuple[int, object], int] = {}

    def __len__(self) -> int:
        return len(self._children) + 1

    def play(self, number: int, rows: list[Row]) -> Play:
        """The turns of one agent, in file order."""
        ids: dict[str, list[int]] = {}
        last: dict[str, str] = {}
        heirs: dict[str, str] = {}
        by_id = {row.request_id: row for row in rows}
        for row in rows:
            base = row.ctx.base or last.get(row.session_id)
            known = ids[base][: row.ctx.keep] if base else []
            ids[row.request_id] = known + [
                block for first, count in row.ctx.add for block in range(first, first + count)
            ]
            if row.op == "append" and base and row.ctx.keep >= by_id[base].input_length // RECORDED_BLOCK:
                heirs[base] = row.request_id
            last[row.session_id] = row.request_id
        names = self._shared(rows, ids)
        return [self._turn(number, row, ids, heirs.get(row.request_id), names) for row in rows]

    def _shared(self, rows: list[Row], ids: dict[str, list[int]]) -> dict[int, object]:
        """Names, the same for all agents, of the blocks that agents of one class share, by their id in this play."""
        names: dict[int, object] = {}
        for row in rows:
            own = ids[row.request_id]
            for block in range(row.prefix_blocks // self.fold if row.prefix_class else 0):
                if (block + 1) * self.fold <= len(own):
                    names[own[(block + 1) * self.fold - 1]] = (row.prefix_class, block)
        return names

    def _turn(
        self, number: int, row: Row, ids: dict[str, list[int]], heir: str | None, names: dict[int, object]
    ) -> Turn:
        """An answer's blocks have the ids that the next prompt gives them, if that prompt keeps all before them."""
        size = self.fold * RECORDED_BLOCK
        own, later = ids[row.request_id], ids[heir] if heir is not None else []
        prompt, context = row.input_length // size, (row.input_length + row.output_length - 1) // size
        at, found = 0, []
        for block in range(max(prompt, context)):
            end = (block + 1) * self.fold
            named = own if block < prompt else later
            key: object = (number, row.request_id, block)
            if end <= len(named):
                key = names.get(named[end - 1]) or (number, named[end - 1])
            at = self._children.setdefault((at, key), len(self))
            found.append(at)
        blocks = np.array(found, np.int32)
        return Turn(row, blocks[:prompt], blocks[:context])


def find(name: str, folder: Path | None) -> Path:
    """The file of a trace in `folder`, else where EI_TRACES says, else in data/traces; SystemExit if it is missing."""
    folder = folder or Path(os.environ.get("EI_TRACES") or Path(__file__).parent.parent / "data" / "traces")
    path = folder / f"{name}.btrace.jsonl.gz"
    if not path.is_file():
        raise SystemExit(f"{path} is missing: name the folder of the traces with --traces or EI_TRACES")
    return path


def rows(path: Path) -> list[list[Row]]:
    """The rows of each agent of a trace."""
    return [play.rows for play in read_trace(path).plays]
