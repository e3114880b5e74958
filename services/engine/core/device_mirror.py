"""What device memory holds, kept from its changes: said again in full to a pool that was started anew."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from schemas.kv import ChangeType, LocationChange, Tier, keys_of


@dataclass(slots=True)
class DeviceMirror:
    """The short keys in device memory, each with the key of the block before it (None at the start of a context)."""

    parents: dict[int, int | None] = field(default_factory=dict)

    def apply(self, change: LocationChange) -> None:
        """Follow one change of tier l1."""
        if change.type is ChangeType.CLEARED:
            self.parents.clear()
            return
        keys: list[int] = keys_of(change.hashes).tolist()
        if change.type is ChangeType.STORED or (change.tier is Tier.L1 and change.type is ChangeType.MOVED):
            self.parents.update(zip(keys, [change.parent, *keys[:-1]], strict=True))
            return
        for key in keys:
            self.parents.pop(key, None)

    def leading(self, keys: Iterable[int]) -> int:
        """How many of these keys, from the first on, are there."""
        return sum(1 for _ in takewhile(self.parents.__contains__, keys))

    def snapshot(self) -> list[LocationChange]:
        """Everything held, as `stored` changes; a run where each block extends the one before it is one change."""
        changes: list[LocationChange] = []
        run: list[int] = []
        for key, parent in self.parents.items():
            if run and parent != run[-1]:
                changes.append(self._stored(run))
                run = []
            run.append(key)
        if run:
            changes.append(self._stored(run))
        return changes

    def _stored(self, run: list[int]) -> LocationChange:
        hashes = np.array(run, "<u8").tobytes()
        return LocationChange(type=ChangeType.STORED, tier=Tier.L1, hashes=hashes, parent=self.parents[run[0]])
