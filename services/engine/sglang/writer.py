"""Copies blocks out of device memory into the arena, on a thread of its own.

One block holds the parts of all ranks: KV that every rank holds alike (MLA) is written by rank 0 alone, KV that is
split over the ranks (GQA) by every rank into its own part. Rank 0 allocates and commits for all.
"""

import torch

from services.engine.sglang.blocks import BlockLayout
from services.engine.sglang.ranks import Ranks
from services.engine.sglang.store import BATCH_BLOCKS, Allocation, ArenaStore

STAGED_BLOCKS = 16
"""Blocks copied between device memory and arena at a time."""


class BlockWriter:
    """Writes runs of blocks. `ranks` belongs to the thread that calls `write`."""

    def __init__(self, store: ArenaStore, layout: BlockLayout, ranks: Ranks) -> None:
        self._store, self._layout, self._ranks = store, layout, ranks
        self._staging = layout.staging(STAGED_BLOCKS)

    def write(self, digests: list[bytes], parent: bytes, indices: torch.Tensor) -> bool:
        """Store the blocks of the pages at `indices`, which follow the block `parent`; True if the arena has all."""
        complete = True
        pages = indices.view(-1, self._layout.page_size)
        for start in range(0, len(digests), BATCH_BLOCKS):
            part = digests[start : start + BATCH_BLOCKS]
            complete &= self._write_batch(part, parent, pages[start : start + len(part)])
            parent = part[-1]
        return complete

    def _write_batch(self, digests: list[bytes], parent: bytes, pages: torch.Tensor) -> bool:
        first = self._ranks.rank == 0
        allocation: Allocation | None = self._ranks.from_first(
            self._store.allocate(digests, parent) if first else self._store.connect()
        )
        if allocation is None:
            return False
        if not allocation.slots:
            return not allocation.refused
        filled = self._ranks.least([int(good) for good in self._fill(allocation, pages)])
        if not first:
            return not allocation.refused
        stored = self._store.commit(allocation.slots, [bool(good) for good in filled], self._layout.block_bytes)
        return stored and not allocation.refused

    def _fill(self, allocation: Allocation, pages: torch.Tensor) -> list[bool]:
        """Copy this rank's part of each wanted block into its slot."""
        if self._layout.replicated and self._ranks.rank:
            return [True] * len(allocation.slots)
        filled: list[bool] = []
        rows = self._staging.numpy()
        for start in range(0, len(allocation.slots), STAGED_BLOCKS):
            slots = allocation.slots[start : start + STAGED_BLOCKS]
            positions = torch.tensor(allocation.positions[start : start + STAGED_BLOCKS])
            self._layout.gather(pages[positions].reshape(-1), self._staging)
            filled += [self._store.fill(slot, self._layout.offset, row) for slot, row in zip(slots, rows, strict=False)]
        return filled
