"""Which nodes hold which blocks in host memory, kept from the nodes' own events."""

from array import array

import numpy as np
import numpy.typing as npt

from schemas.serve import FetchSource

Bits = npt.NDArray[np.uint64]
_STEP = 1 << 20
MAX_NODES = 64


class PoolIndex:
    """One bit per key and node; keys are small integers here. At most 64 nodes."""

    def __init__(self) -> None:
        self._holders: Bits = np.zeros(_STEP, np.uint64)
        self._number: dict[str, int] = {}

    def stored(self, node: str, blocks: "bytes | array[int]") -> None:
        """A node holds these blocks now (uint64 keys)."""
        keys = np.frombuffer(blocks, np.uint64)
        self._reserve(int(keys.max()))
        self._holders[keys] |= self._bit(node)

    def removed(self, node: str, blocks: "bytes | array[int]") -> None:
        """A node holds them no more."""
        keys = np.frombuffer(blocks, np.uint64)
        self._reserve(int(keys.max()))
        self._holders[keys] &= ~self._bit(node)

    def cleared(self, node: str) -> None:
        """A node holds nothing any more."""
        self._holders &= ~self._bit(node)

    def leading(self, keys: "array[int]", limit: int) -> int:
        """Leading blocks of a context, at most `limit`, that all nodes together hold without a gap."""
        return _leading(self._held(keys, limit) != 0)

    def sources(self, keys: "array[int]", first: int, last: int, own: str) -> tuple[FetchSource, ...]:
        """Who supplies blocks [first, last) to `own`, which has none of them from `first` on: the longest runs first.

        All of them must be held by somebody.
        """
        held = self._held(keys, last)
        plan: list[FetchSource] = []
        at = first
        while at < last:
            runs = {node: _leading(held[at:] & self._bit(node) != 0) for node in self._number if node != own}
            node = max(runs, key=lambda name: runs[name], default=own)
            if not runs.get(node):
                at += max(1, _leading(held[at:] & self._bit(own) != 0))
                continue
            plan.append(FetchSource(node=node, first=at, last=at + runs[node]))
            at += runs[node]
        return tuple(plan)

    def _held(self, keys: "array[int]", limit: int) -> Bits:
        if limit <= 0:
            return self._holders[:0]
        wanted = np.frombuffer(keys, np.uint64, min(limit, len(keys)))
        self._reserve(int(wanted.max()))
        return self._holders[wanted]

    def _reserve(self, key: int) -> None:
        if key >= len(self._holders):
            self._holders = np.concatenate([self._holders, np.zeros(key + _STEP - len(self._holders), np.uint64)])

    def _bit(self, node: str) -> np.uint64:
        number = self._number.setdefault(node, len(self._number))
        assert number < MAX_NODES
        return np.uint64(1 << number)


def _leading(flags: npt.NDArray[np.bool_]) -> int:
    """How many of the first flags are set."""
    return len(flags) if flags.all() else int(flags.argmin())
