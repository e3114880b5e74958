"""What stands at all nodes, as columns: a placement adds it up for every node at once."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]
_FIRST = 64


class Numbers:
    """Numbers of nodes, in the order in which they were first named, and which row of a roster each has."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._index: Mapping[str, int] | None = None
        self._rows: Rows = np.zeros(0, np.int64)

    def of(self, node: str) -> int:
        """The number of a node, a new one if it has none."""
        return self._numbers.setdefault(node, len(self._numbers))

    def rows(self, index: Mapping[str, int]) -> Rows:
        """Per number the row of `index`, which is replaced and never changed; len(index) for who is not in it."""
        if index is not self._index or len(self._rows) != len(self._numbers):
            self._index = index
            self._rows = np.array([index.get(node, len(index)) for node in self._numbers], np.int64)
        return self._rows


class NodeColumn:
    """One figure per numbered node."""

    def __init__(self) -> None:
        self._values: Floats = np.zeros(_FIRST)

    def __getitem__(self, number: int) -> float:
        self._reach(number)
        return float(self._values[number])

    def add(self, number: int, change: float) -> None:
        self._reach(number)
        self._values[number] += change

    def set(self, number: int, value: float) -> None:
        self._reach(number)
        self._values[number] = value

    def first(self, count: int) -> Floats:
        """The figures of the first `count` numbers."""
        if count:
            self._reach(count - 1)
        return self._values[:count]

    def _reach(self, number: int) -> None:
        if number >= len(self._values):
            self._values = np.concatenate([self._values, np.zeros(max(number, len(self._values)))])


class Prefills:
    """Prefills at nodes: predicted seconds of each, and a time. A slot without one has 0 seconds and is used again."""

    def __init__(self) -> None:
        self.node: Rows = np.zeros(_FIRST, np.int64)
        self.seconds: Floats = np.zeros(_FIRST)
        self.at: Floats = np.full(_FIRST, np.inf)
        self._slots: dict[tuple[str, int], int] = {}
        self._free = list(range(_FIRST))

    def __len__(self) -> int:
        return len(self._slots)

    def put(self, request: str, node: int, seconds: float, at: float) -> None:
        """One more."""
        if not self._free:
            self._grow()
        slot = self._slots[request, node] = self._free.pop()
        self.node[slot], self.seconds[slot], self.at[slot] = node, seconds, at

    def drop(self, request: str, node: int) -> None:
        """One fewer."""
        slot = self._slots.pop((request, node))
        self.seconds[slot], self.at[slot] = 0.0, np.inf
        self._free.append(slot)

    def held(self) -> set[tuple[str, int]]:
        """(request, node) of each."""
        return set(self._slots)

    def _grow(self) -> None:
        size = len(self.seconds)
        self._free.extend(range(size, 2 * size))
        self.node = np.concatenate([self.node, np.zeros(size, np.int64)])
        self.seconds = np.concatenate([self.seconds, np.zeros(size)])
        self.at = np.concatenate([self.at, np.full(size, np.inf)])
