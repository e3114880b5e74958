"""What the directory shows on /metrics."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from schemas.kv import Tier
from services.directory.core.directory import Directory
from services.observe import Metrics

MATCH_BUCKETS_S = (0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
_COUNTED = {
    "resyncs": ("resyncs", "Snapshots asked of nodes because location messages were missing."),
    "duplicate_locations": ("duplicate_locations", "Location messages that had been applied before."),
    "late_locations": ("late_locations", "Location messages of a life of a node that is over."),
    "drifted_nodes": ("drifted_nodes", "Heartbeats of nodes that hold something else than what they had said."),
    "conflicting_media": ("conflicting_media", "Stored runs cut short at a block known with other media."),
    "overflowed_locations": ("overflowed_locations", "Location messages beyond what may wait for a snapshot."),
    "refused_locations": ("refused_locations", "Location messages of nodes that are not of this cluster."),
    "unknown_removed_blocks": ("unknown_removed_blocks", "Blocks reported as removed that were not known."),
    "unknown_parents": ("unknown_parents", "Stored runs whose parent block was not known."),
    "stray_snapshot_parts": ("stray_snapshot_parts", "Snapshot parts that nobody waited for."),
    "duplicate_events": ("duplicate_events", "Branch events that had been applied before."),
    "late_events": ("late_events", "Branch events of an ended branch or an older version."),
    "foreign_events": ("foreign_events", "Context events from others than routers."),
    "unresolved_contexts": ("unresolved_contexts", "Context events whose blocks could not be told."),
    "transient_requests": ("transient_requests", "Answered requests that did not extend their branch."),
    "demoted_branches": ("demoted_branches", "Branches that were silent beyond their lease."),
    "expired_requests": ("expired_requests", "Requests that were neither answered nor withdrawn in time."),
}


class DirectoryMetrics:
    """Metrics of one directory: what its shell counts, and the state of its core at each scrape."""

    def __init__(self, metrics: Metrics, core: Directory) -> None:
        self.rejected = metrics.counter("rejected_messages_total", "Messages that could not be read.", ["reason"])
        self.match_seconds = metrics.histogram("match_seconds", "Time to answer a match.", buckets=MATCH_BUCKETS_S)
        self.dropped = metrics.counter("dropped_locations_total", "Location messages dropped because they piled up.")
        self.snapshots = metrics.counter("snapshots_total", "Snapshots pulled from nodes.", ["outcome"])
        self.told = metrics.counter("told_blocks_total", "Blocks whose state was told to pools.")
        self.skew = metrics.gauge("event_skew_seconds", "Receipt minus `t` of the newest branch event.")
        self.checkpoint_bytes = metrics.gauge("checkpoint_bytes", "Size of the last checkpoint.")
        self.checkpoint_failures = metrics.counter("checkpoint_failures_total", "Checkpoints that were not written.")
        self.checkpoint_seconds = metrics.gauge("checkpoint_seconds", "Time the last checkpoint took to write.")
        metrics.registry.register(CoreCollector(core))


class CoreCollector(Collector):
    """Reads the core when scraped; nothing is kept twice."""

    def __init__(self, core: Directory) -> None:
        self._core = core

    def collect(self) -> Iterator[Metric]:
        """All metrics of the core."""
        core, prefix = self._core, "ei_directory_"
        for field, (name, text) in _COUNTED.items():
            yield CounterMetricFamily(prefix + name, text, value=getattr(core.counters, field))
        blocks = GaugeMetricFamily(prefix + "blocks", "Block copies by tier, and how they stand.", labels=["kind"])
        for kind, value in self._blocks().items():
            blocks.add_metric([kind], value)
        yield blocks
        yield GaugeMetricFamily(prefix + "known_blocks", "Block keys known.", value=core.tree.blocks)
        yield GaugeMetricFamily(
            prefix + "idle_blocks", "Known keys of blocks that lie nowhere.", value=core.tree.idle_blocks
        )
        yield GaugeMetricFamily(prefix + "claims_count", "Claims held.", value=core.references.claimed_blocks)
        branches = GaugeMetricFamily(prefix + "branches_count", "Branches known.", labels=["state"])
        branches.add_metric(["active"], core.branches.active)
        branches.add_metric(["inactive"], len(core.branches) - core.branches.active)
        yield branches
        yield GaugeMetricFamily(prefix + "pending_count", "Requests between match and end.", value=len(core.pending))
        nodes = GaugeMetricFamily(prefix + "nodes_count", "Nodes by how they stand.", labels=["state"])
        for state, value in self._nodes().items():
            nodes.add_metric([state], value)
        yield nodes
        yield GaugeMetricFamily(prefix + "blind_info", "1 while not all is known after a start.", value=core.blind)

    def _blocks(self) -> dict[str, int]:
        holdings = [holding for node in self._core.locations.nodes.values() for holding in node.holdings.values()]
        return {
            "l1": sum(holding.blocks for holding in holdings if holding.tier is Tier.L1),
            "l2": sum(holding.blocks for holding in holdings if holding.tier is Tier.L2),
            "referenced": sum(holding.referenced for holding in holdings),
            "unreachable": sum(holding.unreachable for holding in holdings),
        }

    def _nodes(self) -> dict[str, int]:
        nodes = list(self._core.locations.nodes.values())
        present = [node for node in nodes if node.present]
        return {
            "synced": sum(node.synced for node in present),
            "repairing": sum(not node.synced for node in present),
            "lost": sum(node.lost for node in nodes),
            "refused": sum(bool(node.refused) for node in nodes),
        }
