"""What ties a symmetric scheduler to our backend: its channel, its report, its copies, its observer."""

import os
from collections.abc import Callable
from typing import Any

from schemas.phase import Phase
from schemas.serve import RequestState
from services.engine.core.turns import Turns
from services.engine.sglang.channel import Channel
from services.engine.sglang.config import PluginConfig, plugin_config
from services.engine.sglang.drop import DecodeCacheDropper
from services.engine.sglang.frames import Capacity
from services.engine.sglang.linker import ArenaLinker
from services.engine.sglang.plugin import verify
from services.engine.sglang.ranks import Ranks
from services.engine.sglang.report import Report
from services.engine.sglang.restore import Restorer
from services.engine.sglang.telemetry import IterationObserver


class Attachment:
    """One per scheduler process. Rank 0 talks to the backend; the other ranks take the same turns silently."""

    def __init__(self, scheduler: Any) -> None:
        config = plugin_config(os.environ)
        assert config is not None
        verify(config)
        self.idle_poll_s = config.idle_poll_s
        self._scheduler = scheduler
        self._ranks = Ranks(scheduler.attn_tp_cpu_group)
        self._recorder = scheduler.tree_cache.tree_core.kv_events
        self.linker: ArenaLinker = scheduler.tree_cache.linker.cache_linker
        self.linker.start(config, _draft_pools(scheduler), self._ranks)
        self.restorer = Restorer(scheduler, self.linker, self._ranks)
        self.observer = IterationObserver(_fed_per_request(), self._first_chunk)
        self.report = Report()
        self._turns = Turns()
        self._dropper = DecodeCacheDropper(scheduler.tree_cache)
        self._channel = self._connect(config)

    def _connect(self, config: PluginConfig) -> Channel | None:
        if self._ranks.rank:
            return None
        channel = Channel(config.channel, "scheduler")
        channel.send(
            Capacity(
                l1_tokens=int(self._scheduler.max_total_num_tokens),
                max_running=int(self._scheduler.max_running_requests),
                block_bytes=self.linker.layout.block_bytes,
                ranks=self._ranks.size,
                pieces=self.linker.layout.description,
            )
        )
        return channel

    @property
    def busy(self) -> bool:
        """Whether copies are under way that SGLang's idle check must wait for."""
        return self.restorer.busy or self.linker.busy or self._dropper.active

    def drop_decode_cache(self) -> None:
        """Begin to free device blocks that only decode used."""
        self._dropper.begin()

    def advance(self) -> None:
        """Once a turn: go on with what takes several turns."""
        self._dropper.advance()

    def prefill_due(self, *, prefilling: bool, decoding: bool) -> bool:
        """Whether the prefill half may run: where both phases have work, when it is due by the clocks of all ranks.

        Not with attention data parallelism: its ranks batch together, and take part in every batch.
        """
        due = self._turns.prefill_due(decoding=decoding)
        if not (prefilling and decoding) or self._scheduler.server_args.enable_dp_attention:
            return True
        return bool(self._ranks.least([int(due)])[0])

    def cancel(self, matches: Callable[[str], bool]) -> None:
        """Requests that match stop waiting for their prefix."""
        self.restorer.cancel(matches)

    def outputs(self, requests: list[Any]) -> None:
        """SGLang streams these requests' outputs."""
        for request in requests:
            if request.finished():
                self.report.ended(request)
                self._out(request)
            else:
                self.report.progress(request)

    def ended_in_queue(self, request: Any, text: str) -> None:
        """SGLang gave a waiting request back."""
        self.report.aborted(request, text)
        self._out(request)

    def _out(self, request: Any) -> None:
        self.restorer.release(request.rid)
        self.observer.forget(request.rid)

    def _first_chunk(self, request: Any, cached: int) -> int:
        restored = min(cached, self.restorer.release(request.rid))
        self.report.state(request.rid, RequestState.PREFILLING, cached, restored)
        return restored

    def batch_ended(self, batch: Any, result: Any, *, prefill: bool) -> None:
        """A batch's result was processed: its tokens, then its iteration."""
        generated = None
        if prefill:
            for request in batch.reqs:
                if request.output_ids and not request.finished():
                    self.report.progress(request)
                    self.report.state(request.rid, RequestState.TRANSFERRING)
        else:
            generated = int(result.get_num_generated_tokens(len(batch.reqs)))
        iteration = self.observer.ended(batch.forward_iter, generated)
        if iteration is not None:
            spent = self._turns.prefilled if iteration.phase is Phase.PREFILL else self._turns.decoded
            spent(iteration.duration_s)
            self.report.iteration(iteration)

    def flush(self) -> None:
        """Send what has happened since the last call."""
        scheduler = self._scheduler
        allocator = scheduler.token_to_kv_pool_allocator
        held = {entry[0].req.rid for entry in scheduler.disagg_decode_transfer_queue._deferred_releases}
        step = self.report.step(allocator.size - allocator.available_size(), held, self._recorder.drain())
        if step is not None and self._channel is not None:
            self._channel.send(step)


def _draft_pools(scheduler: Any) -> list[Any]:
    return [] if scheduler.draft_worker is None else [scheduler.draft_worker.primary_draft_kv_pool]


def _fed_per_request() -> int:
    from sglang.srt.runtime_context import get_spec

    return get_spec().speculative_num_draft_tokens or 1 if get_spec().speculative_algorithm else 1
