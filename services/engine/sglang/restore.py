"""From the node's arena to device memory, before a request joins a batch.

A prefill request whose prefix lies in the arena but not in device memory first has it copied into freshly allocated
pages and put into the radix tree; only then does it enter SGLang's queue, where it finds the prefix on the device. The
copy runs beside whatever batch is running. Pages are reserved in the order of arrival. What cannot be restored (no
room, evicted meanwhile) is computed instead.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from schemas.block_key import namespace_seed
from schemas.pool import SlotInfo
from services.engine.sglang.background import JobThread
from services.engine.sglang.linker import ArenaLinker
from services.engine.sglang.page_hash import page_digests
from services.engine.sglang.ranks import Ranks
from services.engine.sglang.writer import STAGED_BLOCKS


@dataclass
class _Restoration:
    request: Any
    slots: list[SlotInfo]
    indices: torch.Tensor
    anchor: int
    lock: Any
    prefix: int
    blocks: int = 0
    cancelled: bool = False


class Restorer:
    """Restores of one scheduler. Every method is called on the scheduler's thread, with the prefill half active."""

    def __init__(self, scheduler: Any, linker: ArenaLinker, ranks: Ranks) -> None:
        self._tree = scheduler.tree_cache
        self._allocator = scheduler.token_to_kv_pool_allocator
        self._linker = linker
        self._page = linker.page_size
        self._ranks = ranks
        self._running: list[_Restoration] = []
        self._held: dict[str, Any] = {}
        self._restored: dict[str, int] = {}
        self._jobs = JobThread("arena-reader") if linker.store is not None else None
        self._staging = linker.layout.staging(STAGED_BLOCKS) if linker.store is not None else None

    @property
    def busy(self) -> bool:
        """Whether requests wait for their prefix; their pages are in no tree yet."""
        return bool(self._running)

    def begin(self, request: Any) -> bool:
        """Start to restore what lies in the arena beyond the request's device prefix; False if there is nothing."""
        if self._linker.store is None or self._jobs is None:
            return False
        prefix, node, slots = self._find(request)
        (blocks,) = self._ranks.least([len(slots)])
        if not blocks:
            return False
        lock = self._tree.lock(node)
        indices = self._allocate(blocks * self._page)
        if indices is None:
            self._tree.unlock(lock)
            return False
        restoration = _Restoration(request, slots[:blocks], indices, node, lock, prefix)
        self._running.append(restoration)
        self._jobs.put(lambda: self._copy(restoration))
        return True

    def _find(self, request: Any) -> tuple[int, int, list[SlotInfo]]:
        """Device prefix in tokens, the tree node it ends at, and the slots of the blocks that follow."""
        assert self._linker.store is not None
        end = (len(request.origin_input_ids) - 1) // self._page * self._page
        match = self._tree.match_prefix(MatchPrefixParams(key=self._key(request, 0, end)))
        prefix = match.device_prefix_len
        last = self._tree.get_last_hash_value(match.last_device_node) if prefix else None
        tail = self._key(request, prefix, end)
        seed = bytes.fromhex(last) if last else namespace_seed(tail.extra_key, tail.cache_salt)
        return prefix, match.last_device_node, self._linker.store.lookup(page_digests(tail, seed, self._page))

    def _key(self, request: Any, start: int, end: int) -> Any:
        pairs = self._tree.tree_core.is_eagle
        tokens = array("q", request.origin_input_ids[start : end + pairs])
        return RadixKey(tokens, request.extra_key, is_bigram=pairs, cache_salt=request.cache_salt)

    def _allocate(self, tokens: int) -> torch.Tensor | None:
        short = tokens - self._allocator.available_size()
        if short > 0:
            self._tree.evict_for_alloc(EvictParams(num_tokens=short))
        indices: torch.Tensor | None = self._allocator.alloc(tokens)
        return indices

    def _copy(self, restoration: _Restoration) -> bool:
        """On the copying thread: fill the pages block by block, as far as the blocks are still there."""
        assert self._linker.store is not None
        assert self._staging is not None
        rows: Any = self._staging.numpy()
        for start in range(0, len(restoration.slots), STAGED_BLOCKS):
            part = restoration.slots[start : start + STAGED_BLOCKS]
            found = self._linker.store.read(part, rows[: len(part)], self._linker.layout.offset)
            pages = restoration.indices[start * self._page : (start + found) * self._page]
            self._linker.layout.scatter(self._staging, pages)
            restoration.blocks += found
            if found < len(part) or restoration.cancelled:
                break
        return True

    def finished(self) -> list[tuple[Any, bool]]:
        """Requests whose prefix is on the device now, in order of arrival, each with whether it was cancelled."""
        if not self._running or self._jobs is None:
            return []
        (ready,) = self._ranks.least([self._jobs.completed])
        finished, self._running = self._running[:ready], self._running[ready:]
        return [(restoration.request, self._conclude(restoration)) for restoration in finished]

    def _conclude(self, restoration: _Restoration) -> bool:
        (blocks,) = self._ranks.least([restoration.blocks])
        assert self._jobs is not None
        self._jobs.take_done()
        kept = 0 if restoration.cancelled else blocks * self._page
        if kept < len(restoration.indices):
            self._allocator.free(restoration.indices[kept:])
        if kept:
            self._publish(restoration, kept)
        self._tree.unlock(restoration.lock)
        return restoration.cancelled

    def _publish(self, restoration: _Restoration, tokens: int) -> None:
        """Put restored pages into the tree, known as stored, and keep them until the request runs."""
        request, prefix = restoration.request, restoration.prefix
        known = self._tree.path_device_indices(restoration.anchor)
        self._linker.skip_pages = (prefix + tokens) // self._page
        try:
            result = self._tree.insert(
                InsertParams(
                    key=self._key(request, 0, prefix + tokens),
                    value=torch.cat([known, restoration.indices[:tokens]]),
                    prev_prefix_len=prefix,
                    priority=request.priority or 0,
                    session_id=request.session_id,
                )
            )
        finally:
            self._linker.skip_pages = 0
        self._tree.tree_core.mark_external_cache_stored_path(result.last_device_node, restoration.anchor)
        self._held[request.rid] = self._tree.lock(result.last_device_node)
        self._restored[request.rid] = tokens

    def cancel(self, matches: Callable[[str], bool]) -> None:
        """Requests that wait here and match are given back as cancelled once their copy has stopped."""
        for restoration in self._running:
            restoration.cancelled |= matches(restoration.request.rid)

    def release(self, rid: str) -> int:
        """The request runs, or has ended: it holds its own lock, or needs none. Gives its restored tokens once."""
        self._tree.unlock(self._held.pop(rid, None))
        return self._restored.pop(rid, 0)
