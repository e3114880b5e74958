"""One SGLang scheduler that serves prefill and decode requests at once: no role, no restart, no switch.

The process is launched in decode mode. The scheduler builds SGLang's prefill side too and keeps the seven attributes
that belong to one phase twice; a turn of its loop runs the prefill half if it is due, then the decode half. The phase
of a request comes with it (`ei.phase` in its KV hints), so that a phase switch is nothing but other requests.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler, _make_abort_req
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.runtime_context import get_disagg

from schemas.phase import Phase
from services.engine.sglang import names
from services.engine.sglang.attachment import Attachment
from services.engine.sglang.media import ALIKE, alike
from services.engine.sglang.phase_hint import StopTokens, apply_shortest_answer, hinted_phase

_PREFILL, _DECODE = DisaggregationMode.PREFILL, DisaggregationMode.DECODE


class SymmetricScheduler(Scheduler):  # type: ignore[misc] # SGLang has no types
    """SGLang's scheduler with two halves. Outside `prefill_half` its attributes are those of the decode half."""

    attachment: Attachment | None = None
    result_queue: deque[tuple[Any, Any]]
    running_batch: Any
    tokenizer: Any
    _other_half: dict[str, Any]
    _in_prefill = False

    def init_disaggregation(self) -> None:
        """Build SGLang's decode side, then its prefill side beside it."""
        super().init_disaggregation()
        decode_side = {name: value for name, value in vars(self).items() if name.startswith("disagg_decode")}
        decode_half = {name: getattr(self, name) for name in names.PREFILL_HALF}
        with get_disagg().override(disaggregation_mode=_PREFILL.value):
            super().init_disaggregation()
        if self.enable_staging:
            raise names.IncompatibleSglang("SGLANG_DISAGG_STAGING_BUFFER is on: the symmetric scheduler has no staging")
        self._other_half = {
            "waiting_queue": [],
            "running_batch": ScheduleBatch(reqs=[], batch_is_full=False),
            "last_batch": None,
            "chunked_req": None,
            "result_queue": deque(),
            "req_to_metadata_buffer_idx_allocator": self.req_to_metadata_buffer_idx_allocator,
            "disagg_metadata_buffers": self.disagg_metadata_buffers,
        }
        self.__dict__.update(decode_side | decode_half)
        self.disaggregation_mode = _DECODE
        self._sync_disaggregation_mode_to_subcomponents()

    def run_event_loop(self) -> None:
        """Everything is built: check it, attach to our backend, then loop."""
        names.check_scheduler(self)
        self.attachment = Attachment(self)
        super().run_event_loop()

    def _swap(self, mode: Any) -> None:
        mine = {name: getattr(self, name) for name in names.PREFILL_HALF}
        self.__dict__.update(self._other_half)
        self._other_half = mine
        self.disaggregation_mode = mode
        self._sync_disaggregation_mode_to_subcomponents()

    @contextmanager
    def prefill_half(self) -> Iterator[None]:
        """Make the prefill half the active one; nests."""
        if self._in_prefill:
            yield
            return
        with get_disagg().override(disaggregation_mode=_PREFILL.value):
            self._swap(_PREFILL)
            self._in_prefill = True
            try:
                yield
            finally:
                self._in_prefill = False
                self._swap(_DECODE)

    def handle_generate_request(self, recv_req: Any, **rest: Any) -> None:
        """Take a request into the half that its phase hint names (decode without one)."""
        assert self.attachment is not None
        self.attachment.report.entered(recv_req.rid)
        if hinted_phase(recv_req.kv_hints) is not Phase.PREFILL:
            super().handle_generate_request(recv_req, **rest)
            return
        with self.prefill_half():
            super().handle_generate_request(recv_req, **rest)

    def init_tokenizer(self) -> None:
        """SGLang runs without a tokenizer; what it asks one for, when an answer has a least length, is here."""
        super().init_tokenizer()
        if self.tokenizer is None:
            self.tokenizer = StopTokens()

    def _create_generation_req(self, recv_req: Any, *args: Any, **rest: Any) -> Any:
        """SGLang's request, with the least length of its answer."""
        request = super()._create_generation_req(recv_req, *args, **rest)
        apply_shortest_answer(request.sampling_params, Phase.PREFILL if self._in_prefill else Phase.DECODE)
        return request

    def _add_request_to_queue(self, req: Any, is_retracted: bool = False) -> None:
        """A new prefill request waits until what the arena holds of its prefix is on the device."""
        if not is_retracted and alike(req):
            req.set_finish_with_abort(ALIKE)
        attachment = self.attachment
        fresh = self._in_prefill and not is_retracted and not req.finished() and req.to_finish is None
        if fresh and attachment is not None and attachment.restorer.begin(req):
            return
        super()._add_request_to_queue(req, is_retracted)

    def _admit_restored(self, attachment: Attachment) -> None:
        for request, cancelled in attachment.restorer.finished():
            if cancelled:
                self._release_aborted_request(request)
                self.send_abort_output(_make_abort_req(request), request)
            else:
                super()._add_request_to_queue(request)

    def abort_request(self, recv_req: Any) -> None:
        """Abort in both halves, and what waits for its prefix."""
        super().abort_request(recv_req)
        with self.prefill_half():
            super().abort_request(recv_req)
        if self.attachment is not None:
            self.attachment.cancel(lambda rid: recv_req.abort_all or rid.startswith(recv_req.rid))

    def drop_decode_cache(self) -> None:
        """The backend's order, which SGLang's RPC brings to every rank."""
        assert self.attachment is not None
        self.attachment.drop_decode_cache()

    def send_abort_output(self, abort_req: Any, req: Any) -> None:
        """A request that ends in a queue has no output: report its end from here."""
        super().send_abort_output(abort_req, req)
        if self.attachment is not None:
            reason = abort_req.finished_reason or {}
            self.attachment.ended_in_queue(req, str(reason.get("message", "aborted in queue")))

    def get_output_streamer_class(self) -> type:
        """Outputs pass by our report on their way."""
        scheduler = self

        class ReportingStreamer(SchedulerOutputStreamer):  # type: ignore[misc]
            def stream_output(self, reqs: list[Any], *args: Any, **rest: Any) -> None:
                SchedulerOutputStreamer.stream_output(self, reqs, *args, **rest)
                if scheduler.attachment is not None:
                    scheduler.attachment.outputs(reqs)

        return ReportingStreamer

    def is_fully_idle(self, *args: Any, **rest: Any) -> bool:
        """Idle in both halves, with no copy to or from the arena under way."""
        idle = bool(super().is_fully_idle(*args, **rest))
        if self.attachment is None:
            return idle
        with self.prefill_half():
            idle = idle and bool(super().is_fully_idle(*args, **rest))
        return idle and not self.attachment.busy

    def run_batch(self, batch: Any, *args: Any, **rest: Any) -> Any:
        """Run a batch and note its terms before the forward changes them."""
        phase = Phase.PREFILL if self._in_prefill else Phase.DECODE
        assert self.attachment is not None
        launched = self.attachment.observer.launch(batch, phase)
        if self._in_prefill:
            self.attachment.flush()
        result = super().run_batch(batch, *args, **rest)
        self.attachment.observer.launched(batch.forward_iter, launched)
        return result

    def process_batch_result(self, batch: Any, result: Any) -> None:
        """Process a result, then tell its tokens and its iteration."""
        super().process_batch_result(batch, result)
        assert self.attachment is not None
        self.attachment.batch_ended(batch, result, prefill=self._in_prefill)

    @torch.no_grad()
    def event_loop_normal_disagg_decode(self) -> None:
        """The loop without overlap: each half runs its batch and processes the result at once."""
        while not self.gracefully_exit:
            if not self._begin_turn():
                continue
            ran, due = False, self._prefill_due()
            with self.prefill_half():
                if due:
                    batch = self._next_prefill_batch()
                    if batch:
                        self.process_batch_result(batch, self.run_batch(batch))
                    self.last_batch = batch
                    ran = batch is not None
                self.process_disagg_prefill_inflight_queue()
            batch = self._next_decode_batch()
            if batch:
                self.process_batch_result(batch, self.run_batch(batch))
            self.last_batch = batch
            self._end_turn(idle=batch is None and not ran)

    @torch.no_grad()
    def event_loop_overlap_disagg_decode(self) -> None:
        """The loop with overlap: each half launches its batch before it processes the one before."""
        self.result_queue = deque()
        with self.prefill_half():
            self.result_queue = deque()
        while not self.gracefully_exit:
            if not self._begin_turn():
                continue
            due = self._prefill_due()
            with self.prefill_half():
                if due:
                    ran = self._launch_and_process(self._next_prefill_batch(), process_first=False)
                else:
                    ran = self._process_pending()
                self.process_disagg_prefill_inflight_queue()
            batch = self._next_decode_batch()
            serial = self.is_disable_overlap_for_batch(batch, last_batch=self.last_batch)
            ran |= self._launch_and_process(batch, process_first=bool(serial))
            self._end_turn(idle=not ran)

    def _launch_and_process(self, batch: Any, *, process_first: bool) -> bool:
        """Launch `batch` and process the result of the last one, after the launch unless `process_first`."""
        ran = process_first and self._process_pending()
        pending = bool(self.result_queue)
        result = None
        if batch:
            result = self.run_batch(batch)
            self._apply_war_barrier()
            self.result_queue.append((batch.copy(), result))
        if pending:
            self._process_pending()
        self.launch_batch_sample_if_needed(result, batch)
        self.last_batch = batch
        return ran or pending or batch is not None

    def _process_pending(self) -> bool:
        """Process the oldest result that was not yet; whether there was one."""
        pending = bool(self.result_queue)
        if pending:
            self.process_batch_result(*self.result_queue.popleft())
        return pending

    def _prefill_due(self) -> bool:
        """Whether prefill may launch a batch in this turn; the same on all ranks."""
        assert self.attachment is not None
        prefilling = bool(self._other_half["waiting_queue"]) or self._other_half["chunked_req"] is not None
        return self.attachment.prefill_due(prefilling=prefilling, decoding=bool(self.last_batch))

    def _begin_turn(self) -> bool:
        """Take in requests; False while SGLang is paused."""
        self.disagg_decode_prealloc_queue.prefetch_prefill_dp_rank_queries()
        self.ingest_requests()
        assert self.attachment is not None
        self.attachment.advance()
        return not self._engine_paused

    def _next_prefill_batch(self) -> Any:
        assert self.attachment is not None
        self._admit_restored(self.attachment)
        self.waiting_queue.extend(self.disagg_prefill_bootstrap_queue.pop_bootstrapped())
        plan = self.get_next_disagg_prefill_batch_to_run(running_batch=self.running_batch, last_batch=self.last_batch)
        self.running_batch = plan.running_batch
        return self._prepared(plan.batch_to_run)

    def _next_decode_batch(self) -> Any:
        self.process_decode_queue()
        plan = self.get_next_disagg_decode_batch_to_run(running_batch=self.running_batch)
        self.running_batch = plan.running_batch
        return self._prepared(plan.batch_to_run)

    def _prepared(self, batch: Any) -> Any:
        self.cur_batch_for_debug = self.ngram_embedding_manager.prepare_for_forward(batch, chunked_req=self.chunked_req)
        return self.cur_batch_for_debug

    def _end_turn(self, *, idle: bool) -> None:
        """Send the turn's report. Nothing to compute: SGLang's idle checks, then wait for what must come."""
        assert self.attachment is not None
        self.attachment.flush()
        if not idle:
            return
        self._sched_idled = True
        self.on_idle()
        if not self.is_fully_idle():
            time.sleep(self.attachment.idle_poll_s)


def start_rendezvous(original: Any) -> Any:
    """Start the transfer's rendezvous server in this engine although it was launched in decode mode."""
    with get_disagg().override(disaggregation_mode=_PREFILL.value):
        return original()
