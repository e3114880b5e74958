"""The tensor-parallel ranks of one engine. All of them take the same turns in the same order, so they can agree."""

from typing import Any

import torch
import torch.distributed as distributed


class Ranks:
    """Small agreements between ranks over host memory (gloo). With one rank nothing is exchanged.

    Not thread-safe: one instance per thread, each with a group of its own (`fork`, called by all ranks in order).
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.size = int(distributed.get_world_size(group))
        self.rank = int(distributed.get_rank(group))

    def fork(self) -> "Ranks":
        """The same ranks for another thread."""
        if self.size == 1:
            return self
        members = distributed.get_process_group_ranks(self._group)
        return Ranks(distributed.new_group(members, backend="gloo", use_local_synchronization=True))

    def least(self, values: list[int]) -> list[int]:
        """The smallest of each number over the ranks."""
        if self.size == 1 or not values:
            return values
        tensor = torch.tensor(values, dtype=torch.int64)
        distributed.all_reduce(tensor, op=distributed.ReduceOp.MIN, group=self._group)
        return [int(value) for value in tensor.tolist()]

    def from_first(self, value: Any) -> Any:
        """What rank 0 says; the others' `value` is ignored."""
        if self.size == 1:
            return value
        box = [value]
        first = distributed.get_global_rank(self._group, 0)
        distributed.broadcast_object_list(box, src=first, group=self._group)
        return box[0]
