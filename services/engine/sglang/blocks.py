"""Between SGLang's KV pools and the bytes of a block: which tensors a block consists of, gather and scatter.

A rank's part of a block is one page of every tensor, tensor after tensor: K and V of layer 0, K and V of layer 1, ...
(one tensor a layer for MLA), the draft model's last. A block holds the parts of all ranks in order, or one part if
all ranks hold the same. The layout does not depend on where the page lies.
"""

from typing import Any

import torch


class UnsupportedPool(RuntimeError):
    """The model keeps KV in a form that a block of the arena does not hold; the text names the pool class."""


def _pieces(pool: Any) -> list[torch.Tensor]:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    if type(pool) is MHATokenToKVPool:
        return [tensor for pair in zip(pool.k_buffer, pool.v_buffer, strict=True) for tensor in pair]
    if type(pool) is MLATokenToKVPool:
        return list(pool.kv_buffer)
    raise UnsupportedPool(
        f"KV pool {type(pool).__name__} has pieces (sliding window, state space, indexer) that blocks do not hold yet"
    )


def _same_on_all_ranks(pool: Any) -> bool:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    return type(pool) is MLATokenToKVPool


class BlockLayout:
    """How the pages of one rank's KV pools map to blocks. Indices are token slots, `page_size` a page, page-aligned.

    `part_bytes` of a block, from `offset` on, are this rank's; `replicated`: the same for all ranks.
    """

    def __init__(self, pools: list[Any], page_size: int, rank: int = 0, ranks: int = 1) -> None:
        self.page_size = page_size
        tensors = [tensor for pool in pools for tensor in _pieces(pool)]
        self._pages = [tensor.view(len(tensor) // page_size, -1) for tensor in tensors]
        self._sizes = [pages[0].numel() * pages.element_size() for pages in self._pages]
        self.replicated = all(_same_on_all_ranks(pool) for pool in pools)
        self.part_bytes = sum(self._sizes)
        self.block_bytes = self.part_bytes * (1 if self.replicated else ranks)
        self.offset = 0 if self.replicated else rank * self.part_bytes
        self.description = " + ".join(f"{type(pool).__name__} x{len(_pieces(pool))}" for pool in pools)
        self._on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
        self._stream: Any = None
        if not self._on_cpu:
            self._stream = torch.cuda.Stream(tensors[0].device)  # type: ignore[no-untyped-call]

    def staging(self, blocks: int) -> torch.Tensor:
        """Host memory for this rank's part of `blocks` blocks, uint8; page-locked where a GPU copies into it."""
        return torch.empty((blocks, self.part_bytes), dtype=torch.uint8, pin_memory=not self._on_cpu)

    def gather(self, indices: torch.Tensor, staging: torch.Tensor) -> None:
        """Copy the pages at `indices` into the leading rows of `staging`; complete on return."""
        numbers = self._page_numbers(indices)
        with torch.cuda.stream(self._stream):
            at = 0
            for pages, size in zip(self._pages, self._sizes, strict=True):
                rows = pages[numbers].view(torch.uint8)
                staging[: len(numbers), at : at + size].copy_(rows, non_blocking=True)
                at += size
        self._wait()

    def scatter(self, staging: torch.Tensor, indices: torch.Tensor) -> None:
        """Copy the leading rows of `staging` to the pages at `indices`; complete on return."""
        numbers = self._page_numbers(indices)
        with torch.cuda.stream(self._stream):
            at = 0
            for pages, size in zip(self._pages, self._sizes, strict=True):
                rows = staging[: len(numbers), at : at + size].contiguous().view(pages.dtype)
                pages[numbers] = rows.to(pages.device, non_blocking=True)
                at += size
        self._wait()

    def _page_numbers(self, indices: torch.Tensor) -> torch.Tensor:
        return indices[:: self.page_size] // self.page_size

    def after_forward(self, forward_stream: Any) -> None:
        """Make the next copies wait for what `forward_stream` has been given so far (nothing to do on a CPU)."""
        if self._stream is not None and forward_stream is not None:
            self._stream.wait_stream(forward_stream)

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
