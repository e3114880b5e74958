"""The KV of one node: what lies on the device and in host memory, what is promised there, who is told of changes."""

from array import array
from collections.abc import Callable

import numpy as np

from services.simulator.call import Call
from services.simulator.system import KvListener
from services.simulator.tier import Gone, Tier

L1, L2 = "l1", "l2"


class NodeMemory:
    """Blocks of one node. `promised` device blocks belong to requests that run or were let in, outside the tree;
    `held` ones are their prefixes in it, shared ones counted for each.

    `time`: virtual now, for evictions that writing causes.
    """

    def __init__(
        self, name: str, l1_blocks: int, l2_blocks: int, watch: KvListener | None, time: Callable[[], float]
    ) -> None:
        self.name = name
        self.promised = self.held = 0
        self._watch, self._time = watch, time
        self._sizes = l1_blocks, l2_blocks
        self.l1, self.l2 = self._tiers()

    def _tiers(self) -> tuple[Tier, Tier]:
        return Tier(self._sizes[0], None), Tier(self._sizes[1], self._evicted if self._watch is not None else None)

    def _evicted(self, gone: Gone) -> None:
        assert self._watch is not None
        keys = array("Q")
        keys.frombytes(np.arange(gone.first, gone.first + gone.blocks, dtype=np.uint64).tobytes())
        self._watch.removed(self.name, L2, gone.parent, keys, self._time())

    def clear(self) -> None:
        """Both tiers are lost."""
        self.l1, self.l2 = self._tiers()
        if self._watch is not None:
            self._watch.cleared(self.name, L2, self._time())

    def forget(self) -> None:
        """What nobody uses goes."""
        for tier in (self.l1, self.l2):
            tier.make_room(tier.capacity_blocks)

    def leading(self, keys: "array[int]", limit: int) -> tuple[int, int]:
        """(leading blocks on the device, leading blocks that device and host memory supply together)."""
        device = self.l1.reach(keys, 0, limit)
        reach = device
        while True:
            further = self.l2.reach(keys, reach, limit)
            again = self.l1.reach(keys, further, limit)
            if again == reach:
                return device, reach
            reach = again

    def room(self) -> int:
        """Device blocks that a new request could take."""
        return self.l1.capacity_blocks - self.held - self.promised

    def promise(self, blocks: int) -> None:
        """Set device blocks aside for a request; what lies there unused goes."""
        self.promised += blocks
        self.l1.make_room(0, self.promised)

    def write_device(self, keys: "array[int]", first: int, last: int, now: float) -> None:
        self.l1.write(keys, first, last, now, self.promised)

    def write_host(self, keys: "array[int]", first: int, last: int, now: float) -> None:
        """Write what is not here and say so."""
        for start, end in self.l2.write(keys, first, last, now):
            if self._watch is not None:
                parent = keys[start - 1] if start else None
                self._watch.stored(self.name, L2, parent, keys[start:end], now)

    def check(self) -> None:
        self.l1.check()
        self.l2.check()
        assert 0 <= self.promised <= self.l1.capacity_blocks, self.promised


def prompt_and_answer(call: Call) -> "array[int]":
    """Keys of the whole context after the answer."""
    return call.keys + call.output_keys
