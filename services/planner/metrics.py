"""What the planner shows on /metrics."""

from schemas.phase import Phase
from services.observe import Metrics
from services.planner.core.policy import Planner
from services.planner.core.switches import Switch

SWITCH_BUCKETS_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)


class PlannerMetrics:
    """Metrics of one planner."""

    def __init__(self, metrics: Metrics) -> None:
        self.rejected = metrics.counter("rejected_messages_total", "Messages that could not be read.", ["reason"])
        self.refused = metrics.counter("refused_queries_total", "Orders and questions that were refused.", ["verb"])
        self.slices = metrics.counter("slices_total", "Closed telemetry slices.", ["kind"])
        self._nodes = metrics.gauge("split_nodes_count", "Live nodes by the phase they serve.", ["phase"])
        self._switches = metrics.counter("switches_total", "Switches that have ended.", ["outcome"])
        self._took = metrics.histogram(
            "switch_seconds", "From the command to the end of the old phase's last request.", buckets=SWITCH_BUCKETS_S
        )
        self._lost = metrics.counter("switch_lost_tokens_total", "Known tokens computed again during switches.")
        self._failed = metrics.counter("switch_failed_requests_total", "Requests that failed during switches.")
        self._records = metrics.gauge("rejected_records_count", "Telemetry records with values that are not finite.")

    def show(self, planner: Planner) -> None:
        """Bring the gauges up to date."""
        split = planner.fleet.split()
        for phase, count in ((Phase.PREFILL, split.prefill), (Phase.DECODE, split.decode), (Phase.BOTH, split.both)):
            self._nodes.labels(phase.value).set(count)
        self._records.set(planner.windows.rejected)

    def switched(self, switch: Switch) -> None:
        """Count a switch that has ended."""
        self._switches.labels("incomplete" if switch.problems else "complete").inc()
        self._took.observe(switch.took_s or 0.0)
        self._lost.inc(switch.lost_tokens)
        self._failed.inc(switch.failed)
