"""The terms of the iteration-time models, read off SGLang's batches."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from schemas.phase import Phase
from schemas.telemetry import Iteration
from services.engine.sglang.media import media_begun


@dataclass
class _Launched:
    at: float
    phase: Phase
    requests: int
    uncached: int = 0
    pairs: float = 0.0
    cached: int = 0
    restored: int = 0
    context: int = 0
    output: int = 0
    fed: int = 0
    media: int = 0


class IterationObserver:
    """Observes each batch at its launch (terms are final then) and again when its result was processed.

    Batches run one after the other on the device, so one that was launched while another still ran begins when that
    one ended. `first_chunk` is told the first prefill batch of each request and gives its restored tokens.
    """

    def __init__(self, fed_per_request: int, first_chunk: Callable[[Any, int], int]) -> None:
        self._fed_per_request = fed_per_request
        self._first_chunk = first_chunk
        self._launched: dict[int, _Launched] = {}
        self._begun: set[str] = set()
        self._busy_until = 0.0
        self._seq = 0

    def launch(self, batch: Any, phase: Phase) -> _Launched | None:
        """Before the forward; None for batches that compute nothing."""
        mode = batch.forward_mode
        if mode.is_idle() or mode.is_prebuilt():
            return None
        launched = _Launched(time.monotonic(), phase, len(batch.reqs))
        if phase is Phase.DECODE:
            launched.context = sum(len(req.origin_input_ids) + len(req.output_ids) for req in batch.reqs)
            launched.fed = launched.requests * self._fed_per_request
            return launched
        for request, new, before in zip(batch.reqs, batch.extend_lens, batch.prefix_lens, strict=True):
            launched.uncached += new
            launched.pairs += new * before + new * (new + 1) / 2
            launched.output += before + new >= len(request.origin_input_ids)
            first = request.rid not in self._begun
            launched.media += media_begun(request, before, new, first=first)
            if first:
                self._begun.add(request.rid)
                launched.cached += before
                launched.restored += self._first_chunk(request, before)
        return launched

    def launched(self, number: int, launched: _Launched | None) -> None:
        """The batch has SGLang's iteration number now."""
        if launched is not None:
            self._launched[number] = launched

    def ended(self, number: int, generated: int | None) -> Iteration | None:
        """After the result was processed; `generated` tokens came out of a decode batch."""
        launched = self._launched.pop(number, None)
        if launched is None:
            return None
        now = time.monotonic()
        begun = max(launched.at, self._busy_until)
        self._busy_until = now
        self._seq += 1
        accepted = launched.requests if generated is None else generated
        decode = launched.phase is Phase.DECODE
        return Iteration(
            t=time.time(),
            seq=self._seq,
            phase=launched.phase,
            duration_s=max(0.0, now - begun),
            requests=launched.requests,
            uncached_tokens=launched.uncached,
            attention_pairs=launched.pairs,
            restored_tokens=launched.restored,
            cached_tokens=launched.cached,
            context_tokens=launched.context,
            output_tokens=accepted if decode else launched.output,
            accepted_tokens=accepted if decode else 0,
            fed_tokens=launched.fed,
            media=launched.media,
        )

    def forget(self, rid: str) -> None:
        """The request is out."""
        self._begun.discard(rid)
