"""The bus on the metrics page, read at each scrape."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.bus.types import Bus


class BusCollector(Collector):
    """Metrics `ei_bus_*` of one bus."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    def collect(self) -> Iterator[Metric]:
        bus, stats = self._bus, self._bus.stats
        connected = "1 while the broker is reachable, else 0"
        yield GaugeMetricFamily("ei_bus_connected_ratio", connected, value=float(bus.connected))
        refusals = "Subjects that the broker does not let this service use now"
        yield GaugeMetricFamily("ei_bus_refused_subjects_count", refusals, value=len(bus.refusals()))
        yield CounterMetricFamily("ei_bus_reconnects", "Reconnects to the broker", value=stats.reconnects)
        dropped = "Messages dropped because a handler was too slow"
        yield CounterMetricFamily("ei_bus_dropped_messages", dropped, value=stats.dropped)
        requests = CounterMetricFamily("ei_bus_answered_requests", "Requests answered", labels=["subject", "outcome"])
        for endpoint in stats.endpoints:
            requests.add_metric([endpoint.subject, "ok"], endpoint.requests - endpoint.errors)
            requests.add_metric([endpoint.subject, "error"], endpoint.errors)
        yield requests
