"""The keys of every prompt and answer of one running agent.

Recorded block ids become keys by an offset per run, so that two runs of one trace share nothing but the prefix of their
class (system prompt and tools). An answer's blocks have the keys under which its heir's prompt names them.
"""

from array import array
from collections import Counter

import numpy as np

from services.simulator.trace import Play, Turn


class KeySpace:
    """Hands out ranges of keys; the prefix of a class is the same for everybody."""

    def __init__(self) -> None:
        self._next = 1
        self._classes: dict[str, int] = {}

    @property
    def used(self) -> int:
        """Keys below this number have been handed out."""
        return self._next

    def take(self, keys: int) -> int:
        """The first of so many fresh keys."""
        first = self._next
        self._next += keys
        return first

    def of_class(self, name: str, blocks: int) -> int:
        """The first key of the prefix of a class; room for far more than any prefix has."""
        if name not in self._classes:
            self._classes[name] = self.take(max(blocks, 8192))
        return self._classes[name]


class Contexts:
    """Prompts of one run of a play. A prompt is kept while a later turn may start from it."""

    def __init__(self, play: Play, space: KeySpace, block_tokens: int) -> None:
        self._turns, self._space, self._block = play.turns, space, block_tokens
        self._first = space.take(play.ids)
        self._uses = Counter(turn.base for turn in play.turns if turn.base is not None)
        self._kept: dict[int, array[int]] = {}

    def prompt(self, number: int) -> "array[int]":
        """Keys of the full blocks of a turn's prompt; to be asked once per turn."""
        keys = self._kept.get(number)
        if keys is None:
            keys = self._build(number)
        base = self._turns[number].base
        if base is not None:
            self._uses[base] -= 1
            if not self._uses[base]:
                self._kept.pop(base, None)
        if not self._uses[number]:
            self._kept.pop(number, None)
        return keys

    def answer(self, number: int) -> "array[int]":
        """Keys of the blocks that are full only with the answer; all tokens but the last one have KV."""
        keys = self._inherited(number)
        turn = self._turns[number]
        first = turn.prompt_tokens // self._block
        fresh = (turn.prompt_tokens + turn.output_tokens - 1) // self._block - first - len(keys)
        if fresh > 0:
            _append(keys, self._space.take(fresh), fresh)
        return keys

    def _inherited(self, number: int) -> "array[int]":
        """Those keys of a turn's answer that a later prompt names: its heir's."""
        turn = self._turns[number]
        if turn.heir is None:
            return array("Q")
        first = turn.prompt_tokens // self._block
        heir = self._turns[turn.heir]
        last = min(turn.prompt_tokens + turn.output_tokens - 1, heir.prompt_tokens) // self._block
        return self._added(heir, first, last - first)

    def _build(self, number: int) -> "array[int]":
        missing = [number]
        while (base := self._turns[missing[-1]].base) is not None and base not in self._kept:
            missing.append(base)
        for each in reversed(missing):
            self._kept[each] = self._one(self._turns[each])
        return self._kept[number]

    def _one(self, turn: Turn) -> "array[int]":
        blocks = turn.prompt_tokens // self._block
        if turn.base is None:
            keys = array("Q")
        elif turn.goes_on:
            keys = self._kept[turn.base][:blocks]
            keys.extend(self._inherited(turn.base)[: blocks - len(keys)])
        else:
            keys = self._kept[turn.base][: min(turn.keep, blocks)]
        keys.extend(self._added(turn, len(keys), blocks - len(keys)))
        if len(keys) < blocks:
            fresh = blocks - len(keys)
            _append(keys, self._space.take(fresh), fresh)
        if turn.prefix_class is not None and turn.base is None:
            shared = min(turn.prefix_blocks, blocks)
            common = array("Q")
            _append(common, self._space.of_class(turn.prefix_class, shared), shared)
            keys[:shared] = common
        return keys

    def _added(self, turn: Turn, first: int, blocks: int) -> "array[int]":
        """Keys that the turn's recipe names for prompt blocks [first, first + blocks), as far as it does."""
        keys = array("Q")
        at = turn.keep
        for start, length in turn.add:
            low, high = max(first, at), min(first + blocks, at + length)
            if low < high:
                _append(keys, self._first + start + low - at, high - low)
            at += length
        return keys


def _append(keys: "array[int]", first: int, count: int) -> None:
    """Put `count` consecutive keys behind `keys`."""
    keys.frombytes(np.arange(first, first + count, dtype=np.uint64).tobytes())
