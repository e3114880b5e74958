"""What the directory counts of what it was told: nothing is left out without a count."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Totals since the start. Location messages: duplicate, late, overflow, refused. Resyncs: snapshots asked for."""

    resyncs: int = 0
    duplicate_locations: int = 0
    late_locations: int = 0
    drifted_nodes: int = 0
    conflicting_media: int = 0
    overflowed_locations: int = 0
    refused_locations: int = 0
    unknown_removed_blocks: int = 0
    unknown_parents: int = 0
    stray_snapshot_parts: int = 0
    duplicate_events: int = 0
    late_events: int = 0
    foreign_events: int = 0
    unresolved_contexts: int = 0
    transient_requests: int = 0
    demoted_branches: int = 0
    expired_requests: int = 0
    matches: int = 0
