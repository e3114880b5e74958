"""What the pool counts. Gauges and totals of the core are read at each scrape, the rest is counted where it happens."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.kvpool.store import Store
from services.observe import Metrics

_FETCH_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class PoolMetrics:
    """Counters of the shell."""

    def __init__(self, metrics: Metrics) -> None:
        self.fetch_seconds = metrics.histogram(
            "fetch_seconds",
            "Time of a fetch, by whether all, some or none of the prefix is here after it",
            ["outcome"],
            buckets=_FETCH_BUCKETS_S,
        )
        self.fetched_bytes = metrics.counter("fetched_bytes_total", "Bytes brought here from peers", ["transport"])
        self.fetched_blocks = metrics.counter("fetched_blocks_total", "Blocks brought here from peers", ["transport"])
        self.undelivered = metrics.counter(
            "undelivered_blocks_total",
            "Blocks a copy was begun for and that were not taken in: stale, corrupt (fingerprint), failed, skipped, "
            "unsettled (slot lost until restart), late",
            ["reason"],
        )
        self.pulls = metrics.counter("pulls_total", "Batches asked from peers, by how they ended", ["outcome"])
        self.deadline_exceeded = metrics.counter(
            "deadline_exceeded_total", "Fetches that ended at their deadline with less than was asked"
        )
        self.calls = metrics.counter(
            "calls_total", "Calls answered, by verb, way in and outcome", ["verb", "via", "outcome"]
        )
        self.rejected = metrics.counter(
            "rejected_messages_total", "Messages that are not what their subject takes", ["subject", "reason"]
        )
        self.unpublished = metrics.counter(
            "unpublished_messages_total", "Location messages the bus did not take; a snapshot repairs what they said"
        )
        self.snapshots = metrics.counter("snapshots_total", "Snapshots begun")


class PoolCollector(Collector):
    """The core's own numbers."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        core, block_size = self._store.core, self._store.identity.block_size
        slots, order, counters = core.blocks.slots, core.blocks.order, core.counters
        states = {
            "total": slots.capacity,
            "free": slots.free_slots,
            "writing": slots.writing_slots,
            "aside": slots.aside_slots,
            "referenced": order.referenced_blocks,
            "unreachable": order.unreachable_blocks,
            "held": order.held_blocks,
            "unverified": len(core.blocks.unverified),
            "device": len(core.log.l1),
        }
        states["used"] = states["total"] - states["free"]
        blocks = GaugeMetricFamily("ei_kvpool_blocks", "Blocks by what holds of them; states overlap", labels=["state"])
        tokens = GaugeMetricFamily("ei_kvpool_tokens", "The same in tokens", labels=["state"])
        for state, count in states.items():
            blocks.add_metric([state], count)
            tokens.add_metric([state], count * block_size)
        yield from (blocks, tokens)
        yield GaugeMetricFamily("ei_kvpool_leases_count", "Leases of peers now", value=len(core.leases))
        yield GaugeMetricFamily("ei_kvpool_pins_count", "Pins of the engine now", value=len(core.pins))
        yield GaugeMetricFamily("ei_kvpool_location_seq_count", "Last number of the location log", value=core.log.seq)
        evicted = CounterMetricFamily(
            "ei_kvpool_evicted_blocks", "Blocks evicted: referenced yes or no, or unreachable", labels=["referenced"]
        )
        evicted.add_metric(["yes"], counters.evicted_referenced)
        evicted.add_metric(["no"], counters.evicted_unreferenced)
        evicted.add_metric(["unreachable"], counters.evicted_unreachable)
        yield evicted
        refused = CounterMetricFamily("ei_kvpool_refused_blocks", "Blocks no slot was given for", labels=["reason"])
        refused.add_metric(["room"], counters.refused_no_room)
        refused.add_metric(["collision"], counters.refused_collision)
        yield refused
        expired = CounterMetricFamily("ei_kvpool_expired", "Holds that ended by time, not by release", labels=["kind"])
        expired.add_metric(["pin"], counters.expired_pins)
        expired.add_metric(["lease"], counters.expired_leases)
        yield expired
        yield CounterMetricFamily(
            "ei_kvpool_stale_commits", "Commits of slots the writer no longer held", value=counters.stale_commits
        )
        yield CounterMetricFamily(
            "ei_kvpool_discarded_blocks",
            "Blocks taken out because their bytes were wrong",
            value=counters.discarded,
        )
        yield CounterMetricFamily(
            "ei_kvpool_rejected_fingerprints",
            "Adopted blocks whose bytes were not those that were committed",
            value=self._store.rejected_fingerprints,
        )
