"""From device memory to the node's arena: SGLang's external-store link, used for writing only.

Blocks are written through as soon as they enter the radix tree. Prefill requests write everything, decode requests
only blocks whose last token is an output token (their prompt's blocks are the prefill node's to write); that is
decided here, before any copy. Reading back is `restore`'s job: it must be done before a request joins a batch.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker

from schemas.pool import AttachRequest
from services.engine.sglang.background import JobThread
from services.engine.sglang.blocks import BlockLayout
from services.engine.sglang.config import PluginConfig
from services.engine.sglang.drop import mark_prefill_path
from services.engine.sglang.ranks import Ranks
from services.engine.sglang.store import ArenaStore
from services.engine.sglang.writer import BlockWriter


class ArenaLinker(UnifiedCacheLinker):  # type: ignore[misc] # SGLang has no types
    """Writes blocks to the arena in the background; loads nothing. `start` before the first offload."""

    def __init__(self, _server_args: Any, params: Any, *, forward_stream: Any = None, **_rest: Any) -> None:
        self._pool = params.token_to_kv_pool_allocator.get_kvcache()
        self.page_size = params.page_size
        self.forward_stream = forward_stream
        self.layer_done_counter = LayerWiseLoadCounter(self._pool.layer_num)
        self.pools = {PoolName.KV: self._pool}
        self.layout: BlockLayout
        self.store: ArenaStore | None = None
        self.skip_pages = 0
        """Leading pages of the context being inserted that are not ours to write."""
        self._parent = b""
        self._writer: BlockWriter | None = None
        self._jobs: JobThread | None = None

    def start(self, config: PluginConfig, draft_pools: list[Any], ranks: Ranks) -> None:
        """Decide what a block is and begin to write, if there is a pool. UnsupportedPool names what it cannot hold."""
        self.layout = BlockLayout([self._pool, *draft_pools], self.page_size, ranks.rank, ranks.size)
        if not config.pool:
            return
        attach = AttachRequest(
            role="storage",
            model=config.model,
            block_size=self.page_size,
            block_bytes=self.layout.block_bytes,
            key_version=config.key_version,
        )
        self.store = ArenaStore(Path(config.pool), attach)
        self.store.connect()
        self._writer = BlockWriter(self.store, self.layout, ranks.fork())
        self._jobs = JobThread("arena-writer")

    @property
    def busy(self) -> bool:
        """Whether writes are under way or wait to be acknowledged."""
        return self._jobs is not None and self._jobs.pending + self._jobs.completed > 0

    def offload_from(self, first_page: int, pages: int, parent: bytes, queue: Callable[[], None]) -> None:
        """Let SGLang queue the tree node of `pages` pages from `first_page` on after digest `parent`, if it is ours."""
        if first_page + pages > self.skip_pages and self._jobs is not None:
            self._parent = parent
            queue()

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """SGLang's call for one tree node (see `offload_from`): True if its copy was queued."""
        jobs, writer, parent = self._jobs, self._writer, self._parent
        if jobs is None or writer is None or len(transfers) != 1:
            return False
        digests = [bytes.fromhex(key) for key in transfers[0].keys]
        indices: torch.Tensor = transfers[0].device_indices
        self.layout.after_forward(self.forward_stream)
        jobs.put(lambda: writer.write(digests, parent, indices))
        return True

    def num_completed_offloads(self) -> int:
        return 0 if self._jobs is None else self._jobs.completed

    def pop_completed_offload(self) -> bool:
        assert self._jobs is not None
        return self._jobs.take_done()

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        return []

    def load(self, rid: str, transfers: list[Any]) -> bool:
        return False

    def start_layer_wise_loading(self) -> int:
        return -1

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        return False

    def reset(self) -> None:
        if self._jobs is not None:
            self._jobs.quiesce()

    def close(self) -> None:
        if self._jobs is not None:
            self._jobs.close()
        if self.store is not None:
            self.store.close()


def match_device_only(_wrapper: Any, _key: Any, _request: Any, result: Any) -> Any:
    """In the place of the link's own look-up at every match: what lies in the arena was restored before."""
    return result


def around_checkpoint(original: Any, tree: Any, request: Any, *, up_to: int, **rest: Any) -> None:
    """While a decode request's blocks enter the tree, its prompt's pages are not ours to write."""
    from sglang.srt.runtime_context import get_disagg

    link: ArenaLinker = tree.linker.cache_linker
    if get_disagg().disaggregation_mode != "decode":
        original(tree, request, up_to=up_to, **rest)
        mark_prefill_path(tree.tree_core.node_by_id(request.last_node))
        return
    link.skip_pages = len(request.origin_input_ids) // link.page_size
    try:
        original(tree, request, up_to=up_to, **rest)
    finally:
        link.skip_pages = 0


def around_offload_node(original: Any, wrapper: Any, node_id: int, transfers: list[Any]) -> None:
    """Tell our link where in its context the tree node lies before SGLang hands it over."""
    node = wrapper.cache.tree_core.node_by_id(node_id)
    first_page, ancestor = 0, node.parent
    while ancestor is not None and ancestor.hash_value:
        first_page += len(ancestor.hash_value)
        ancestor = ancestor.parent
    last = node.parent.get_last_hash_value() if first_page else None
    wrapper.cache_linker.offload_from(
        first_page,
        len(node.hash_value or ()),
        bytes.fromhex(last) if last else b"",
        lambda: original(wrapper, node_id, transfers),
    )
