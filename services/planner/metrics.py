"""What the planner shows on /metrics."""

from schemas.iteration_model import IterationModel
from schemas.phase import Decision, Phase
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

        self._decisions = metrics.counter(
            "decisions_total", "Decisions taken without being asked.", ["kind", "outcome"]
        )
        self._errors = metrics.gauge(
            "model_error_ratio", "Mean relative error of a node's model on its newest windows.", ["node", "phase"]
        )
        self._warm_up = metrics.gauge("warming_up_count", "1 until the iteration-time models are frozen.")

    def show(self, planner: Planner, models: list[IterationModel]) -> None:
        """Bring the gauges up to date; `models` is empty when they are as before."""
        self._warm_up.set(planner.models.warming_up)
        for model in models:
            for phase, error in ((Phase.PREFILL, model.prefill_error), (Phase.DECODE, model.decode_error)):
                if error is not None and phase.value not in model.borrowed:
                    self._errors.labels(model.node, phase.value).set(error)
        split = planner.fleet.split()
        for phase, count in ((Phase.PREFILL, split.prefill), (Phase.DECODE, split.decode), (Phase.BOTH, split.both)):
            self._nodes.labels(phase.value).set(count)
        self._records.set(planner.windows.rejected)

    def decided(self, decision: Decision) -> None:
        """Count a decision of the planner's own."""
        outcome = "ordered" if decision.applied else "held" if decision.split_new is None else "said"
        self._decisions.labels(decision.kind, outcome).inc()

    def switched(self, switch: Switch) -> None:
        """Count a switch that has ended."""
        self._switches.labels("incomplete" if switch.problems else "complete").inc()
        self._took.observe(switch.took_s or 0.0)
        self._lost.inc(switch.lost_tokens)
        self._failed.inc(switch.failed)
