"""Metrics of the engine service."""

from schemas.phase import Phase
from schemas.telemetry import Iteration
from services.engine.core.queueing import Counts
from services.observe import Metrics

ITERATION_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10)


class EngineMetrics:
    """`ei_engine_*`; labels phase, outcome, reason, kind."""

    def __init__(self, metrics: Metrics) -> None:
        self.waiting = metrics.gauge("waiting_count", "Legs that wait outside the engine.")
        self.running = metrics.gauge("running_count", "Legs inside the engine.", ("phase",))
        self.ended = metrics.counter("legs_total", "Legs that have ended, by outcome.", ("phase", "outcome"))
        self.refused = metrics.counter("refused_total", "Legs not taken, by reason.", ("reason",))
        self.rejected = metrics.counter(
            "rejected_messages_total", "Messages that could not be read.", ("kind", "reason")
        )
        self.tokens = metrics.counter("tokens_total", "Tokens computed, cached, restored from host, output.", ("kind",))
        self.iterations = metrics.histogram(
            "iteration_seconds", "Duration of iterations.", ("phase",), ITERATION_BUCKETS_S
        )
        self.queued = metrics.histogram(
            "queue_seconds", "From arrival of a leg to its entry into the engine.", ("phase",)
        )
        self.fetches = metrics.histogram("fetch_seconds", "Time a fetch into the own pool took.")
        self.fetch_deadline = metrics.counter("fetch_deadline_total", "Fetches given up for recomputing.")
        self.handoffs = metrics.counter("handoff_total", "Hand-off messages to other nodes.", ("verb", "outcome"))
        self.switches = metrics.histogram("switch_seconds", "Duration of phase switches.")
        self.resent = metrics.counter("resent_total", "Answers asked for again.")

    def counts(self, counts: Counts) -> None:
        """The queue as it is now."""
        self.waiting.set(counts.waiting)
        self.running.labels(Phase.PREFILL).set(counts.running_prefill)
        self.running.labels(Phase.DECODE).set(counts.running_decode)

    def iteration(self, iteration: Iteration) -> None:
        """One iteration has ended."""
        self.iterations.labels(iteration.phase).observe(iteration.duration_s)
        self.tokens.labels("computed").inc(iteration.uncached_tokens)
        self.tokens.labels("restored").inc(iteration.restored_tokens)
        self.tokens.labels("output").inc(iteration.output_tokens)
