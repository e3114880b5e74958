"""What the router shows on /metrics."""

from collections.abc import Callable, Sequence

from schemas.block_key import token_list
from services.observe import Metrics
from services.router.core.context_memo import Departure
from services.router.core.effects import Record
from services.router.core.router import RouterCore

_STEP_BUCKETS_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.5, 1, 2, 5)
_ERROR_BUCKETS_S = (0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 100)


class RouterMetrics:
    """Metrics of one router; `ended` counts a request once, at its end."""

    def __init__(self, metrics: Metrics, core: RouterCore) -> None:
        self.requests = metrics.counter("requests_total", "Requests that ended, by outcome.", ["outcome"])
        self.refused = metrics.counter("refused_total", "Calls answered with an error, by HTTP status.", ["status"])
        self.ttft = metrics.histogram("ttft_seconds", "Arrival to first token.")
        self.tpot = metrics.histogram("tpot_seconds", "Time per output token after the first.", buckets=_STEP_BUCKETS_S)
        self.e2e = metrics.histogram("e2e_seconds", "Arrival to end of the answer.")
        self.prompt_tokens = metrics.counter("prompt_tokens_total", "Prompt tokens answered, by source.", ["source"])
        self.misses = metrics.counter("uncached_tokens_total", "Prompt tokens computed, by cause.", ["cause"])
        self.output_tokens = metrics.counter("output_tokens_total", "Tokens generated.")
        self.lost_reuse = metrics.counter("lost_reuse_tokens_total", "Known prompt tokens that were computed again.")
        self.ideal = metrics.counter("ideal_hit_tokens_total", "Prompt tokens whose keys the directory remembered.")
        self.ttft_error = metrics.histogram(
            "predicted_ttft_error_seconds",
            "Absolute difference of predicted and measured TTFT.",
            ["direction"],
            buckets=_ERROR_BUCKETS_S,
        )
        self.attempts = metrics.counter("retries_total", "Attempts after the first of a request.")
        self.blind = metrics.counter("blind_total", "Requests placed without the directory.")
        self.rejected = metrics.counter("rejected_messages_total", "Messages that could not be read.", ["reason"])
        self.events_lost = metrics.counter("lost_events_total", "Branch events the broker did not take.", ["type"])
        metrics.gauge("open_requests_count", "Requests under way.", read=lambda: len(core.requests))
        self._departed = metrics.counter(
            "answer_tokens_departed_total", "Generated tokens that the next prompt says otherwise, by cause.", ["cause"]
        )
        self._clients = metrics.counter("clients_cancelled_total", "Clients cancelled, by reason.", ["reason"])

    def client_cancelled(self, reason: str) -> None:
        self._clients.labels(reason).inc()

    def departed(self, departure: Departure, decode: Callable[[Sequence[int]], str]) -> None:
        """A prompt left its branch's last answer: in other words, or in the same words as other tokens."""
        generated, given = (decode(token_list(packed)) for packed in (departure.generated, departure.given))
        cause = "tokens" if given.startswith(generated) else "text"
        self._departed.labels(cause).inc(departure.lost_tokens)

    def ended(self, record: Record) -> None:
        """Count a request that ended."""
        self.requests.labels(record.outcome.value).inc()
        self.attempts.inc(record.attempts - 1)
        self.blind.inc(record.blind)
        self.output_tokens.inc(record.output_tokens)
        if not record.outcome.answered:
            return
        self.e2e.observe(record.ended - record.arrived)
        self.prompt_tokens.labels("restored").inc(record.restored_tokens)
        self.prompt_tokens.labels("cached").inc(max(0, record.cached_tokens - record.restored_tokens))
        self.prompt_tokens.labels("uncached").inc(record.uncached_tokens)
        self.ideal.inc(record.known_tokens)
        self.lost_reuse.inc(record.lost_tokens)
        for cause, tokens in record.misses.items():
            self.misses.labels(cause.value).inc(tokens)
        self._first_token(record)

    def _first_token(self, record: Record) -> None:
        ttft = record.ttft_s
        if ttft is None or record.first_token is None:
            return
        self.ttft.observe(ttft)
        if record.output_tokens > 1:
            self.tpot.observe((record.ended - record.first_token) / (record.output_tokens - 1))
        if record.ttft_predicted_s is not None and record.attempts == 1:
            error = record.ttft_predicted_s - ttft
            self.ttft_error.labels("over" if error > 0 else "under").observe(abs(error))
