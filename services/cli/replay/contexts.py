"""The prompts of one agent, built while it plays: recorded block ids become tokens, answers are the real ones.

A block id stands for the whole prefix up to it, so tokens once sent under an id are used again wherever it recurs. A
request that goes on where another ended contains that one's prompt and the answer the engine really gave, then the
recorded number of new tokens.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.btrace import Operation, Row
from services.cli.replay.tokens import Tokens

TAIL_BLOCKS = 2
"""Chat templates rewrite up to so many blocks at the end of a prompt; a request that keeps the rest goes on from it."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Recorded lengths to played ones: a recorded block of `source` tokens becomes `target` tokens."""

    source: int
    target: int

    def prompt(self, tokens: int) -> int:
        return max(1, tokens * self.target // self.source)

    def output(self, tokens: int) -> int:
        return max(1, round(tokens * self.target / self.source))


class TokenSource:
    """Deterministic pseudo-random tokens of an alphabet of token ids."""

    def __init__(self, alphabet: Sequence[int], seed: str) -> None:
        if not 2 <= len(alphabet) <= 65_536:
            raise ValueError(f"an alphabet of {len(alphabet)} tokens, 2 to 65,536 are needed")
        self._alphabet = np.array(alphabet, dtype=np.uint32)
        self._seed = seed

    def tokens(self, key: str, count: int) -> Tokens:
        """`count` tokens that `key` alone decides."""
        drawn = hashlib.shake_128(f"{self._seed}\0{key}".encode()).digest(2 * count)
        chosen = self._alphabet[np.frombuffer(drawn, dtype="<u2") % len(self._alphabet)]
        return array("I", chosen.tobytes())


@dataclass(slots=True)
class _Played:
    prompt: Tokens
    answer: Tokens | None = None


class PlayContexts:
    """Contexts of one run of one agent (`instance` tells runs of the same agent apart).

    Only prompts that a later request starts from are kept.
    """

    def __init__(self, rows: Sequence[Row], instance: str, scale: Scale, source: TokenSource) -> None:
        self._scale, self._source, self._instance = scale, source, instance
        self._rows = {row.request_id: row for row in rows}
        self._base = _bases(rows)
        self._uses = Counter(self._base.values())
        self._ids = _block_ids(rows, self._base)
        self._shared = _shared_blocks(rows, self._ids)
        self._sent: dict[int, Tokens] = {}
        self._played: dict[str, _Played] = {}

    def prompt(self, row: Row) -> Tokens:
        """The tokens to send for `row` now. Its base should have been answered; what is missing is filled up."""
        tokens = self._start(row)
        wanted = self._scale.prompt(row.input_length)
        ids, size = self._ids[row.request_id], self._scale.target
        while len(tokens) < wanted:
            index = len(tokens) // size
            if index < len(ids):
                tokens.extend(self._block(ids[index])[len(tokens) % size :])
            else:
                tokens.extend(self._source.tokens(f"{self._instance} {row.request_id} tail", wanted - len(tokens)))
        for index, block in enumerate(ids):
            self._sent.setdefault(block, tokens[index * size : (index + 1) * size])
        if self._uses[row.request_id]:
            self._played[row.request_id] = _Played(tokens)
        return tokens

    def answered(self, row: Row, answer: Tokens) -> None:
        """The engine's answer to `row`."""
        if (played := self._played.get(row.request_id)) is not None:
            played.answer = answer

    def _start(self, row: Row) -> Tokens:
        """What the context holds already: a copy, not longer than recorded."""
        base_id = self._base[row.request_id]
        base = self._take(base_id) if base_id is not None else None
        wanted = self._scale.prompt(row.input_length)
        if base_id is not None and base is not None and base.answer is not None and self._continues(row, base_id):
            recorded = self._rows[base_id]
            tokens = base.prompt + base.answer
            grew = row.input_length >= recorded.input_length + recorded.output_length
            return tokens if grew else tokens[:wanted]
        tokens = array("I")
        for block in self._ids[row.request_id]:
            if (known := self._sent.get(block)) is None:
                break
            tokens.extend(known)
        return tokens[:wanted]

    def _continues(self, row: Row, base_id: str) -> bool:
        goes_on = row.op in (Operation.APPEND, Operation.FORK)
        return goes_on and row.ctx.keep >= len(self._ids[base_id]) - TAIL_BLOCKS

    def _take(self, request_id: str) -> _Played | None:
        self._uses[request_id] -= 1
        if self._uses[request_id]:
            return self._played.get(request_id)
        return self._played.pop(request_id, None)

    def _block(self, block: int) -> Tokens:
        key = self._shared.get(block) or f"{self._instance} {block}"
        return self._source.tokens(key, self._scale.target)


def _bases(rows: Sequence[Row]) -> dict[str, str | None]:
    """The request whose context each request starts from."""
    previous: dict[str, str] = {}
    bases: dict[str, str | None] = {}
    for row in rows:
        bases[row.request_id] = row.ctx.base or previous.get(row.session_id)
        previous[row.session_id] = row.request_id
    return bases


def _block_ids(rows: Sequence[Row], bases: dict[str, str | None]) -> dict[str, list[int]]:
    """The recorded block ids of every prompt, expanded in file order (a base need not be a dependency)."""
    ids: dict[str, list[int]] = {}
    for row in rows:
        base = bases[row.request_id]
        kept = ids[base][: row.ctx.keep] if base is not None else []
        ids[row.request_id] = kept + [block for first, count in row.ctx.add for block in range(first, first + count)]
    return ids


def _shared_blocks(rows: Sequence[Row], ids: dict[str, list[int]]) -> dict[int, str]:
    """Blocks that all agents of a class have in common (system prompt and tools), by what they are."""
    return {
        block: f"shared {row.prefix_class} {index}"
        for row in rows
        if row.prefix_class is not None
        for index, block in enumerate(ids[row.request_id][: row.prefix_blocks])
    }
