"""Twenty million block copies on 64 nodes: a restart from snapshots, its memory, matches and branch events after it,
then a checkpoint with events between its slices, a node that is switched to prefill and one that is lost.

Matches, events and slices of work are timed by the thread's own clock, which stands while others have the core. What
interrupts it from outside still counts, so every branch is asked in each of several passes, thousands of others between
them, and its quickest match and event count; `once` is the quietest of many rounds of the same, each match by itself,
and `bare` how a plain loop of the same length does by that measure.
"""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from bench.directory_load import BLOCK_TOKENS, CONTEXT_TOKENS
from bench.directory_sides import quietest, rss_bytes
from schemas.branch import BRANCH_EVENT, BranchEvent, BranchEventType
from schemas.codec import encode
from schemas.directory import MatchQuery
from schemas.kv import SNAPSHOT_PART, ChangeType, KvLocation, LocationChange, SnapshotPart, Tier
from schemas.phase import Phase, PhaseCommand
from services.directory.checkpoints import frame
from services.directory.collector import TIDY_S, ShortCollections
from services.directory.core.checkpoint import Saving
from services.directory.core.directory import Directory, DirectoryConfig
from services.directory.helpings import HELPING_S, helping, helping_saved

DEPTH = CONTEXT_TOKENS // BLOCK_TOKENS
SHARED = DEPTH // 4
TURN = 31
PART_CHANGES = 16
ROUND = 500
PASSES = 5
TIDY_SLICES = round(TIDY_S / HELPING_S)


class Cluster:
    """Contexts of 100,000 tokens with a common first quarter; one node holds a context whole, another what came after
    its middle, as a prefill and a decode node do."""

    def __init__(self, copies: int, nodes: int) -> None:
        rng = np.random.default_rng(4)
        each = (DEPTH - SHARED) + DEPTH // 2
        count = (copies - nodes * SHARED) // each
        self.nodes = nodes
        self.shared = rng.integers(0, 1 << 64, SHARED, np.uint64)
        self.tails = rng.integers(0, 1 << 64, (count, DEPTH - SHARED), np.uint64)

    def context(self, number: int) -> bytes:
        return self.shared.tobytes() + self.tails[number].tobytes()

    def parts(self, node: int) -> Iterator[bytes]:
        """The snapshot of one node, as its pool sends it: a few contexts a part."""
        changes = [_run(None, self.shared)]
        for number in range(len(self.tails)):
            tail = self.tails[number]
            if number % self.nodes == node:
                changes.append(_run(int(self.shared[-1]), tail))
            elif (number * 7 + 3) % self.nodes == node:
                middle = DEPTH // 2 - SHARED
                changes.append(_run(int(tail[middle - 1]), tail[middle:]))
        for start in range(0, len(changes), PART_CHANGES):
            last = start + PART_CHANGES >= len(changes)
            part = SnapshotPart(
                node=f"n{node}",
                incarnation=1,
                seq=9,
                snapshot="s",
                changes=changes[start : start + PART_CHANGES],
                next_cursor=None if last else start + PART_CHANGES,
            )
            yield encode(part)


def at_scale(copies: int, nodes: int) -> dict[str, Any]:
    cluster = Cluster(copies, nodes)
    collections = ShortCollections()
    before = rss_bytes()
    directory = Directory(DirectoryConfig(), incarnation=1, blind=True)
    took_s, cpu_s, longest_s = _restart(directory, cluster)
    held = directory.stats().copies
    opened = [_timed(directory, cluster, number, 0) for number in range(len(cluster.tails))]
    grown = rss_bytes() - before
    order = _order(len(cluster.tails))
    matches = [[_match(directory, cluster, number) for number in order] for _ in range(PASSES)]
    bare = _rounds([_bare() for _ in order])
    events = [[_timed(directory, cluster, number, turn) for number in order] for turn in range(1, PASSES + 1)]
    keys = directory.stats().blocks
    checkpoint_s, checkpoint_bytes = _saved(directory, cluster, collections)
    switch_s = _switched(directory)
    loss_s = _lost(directory, nodes)
    return {
        "copies": held,
        "keys": keys,
        "branches": len(opened),
        "restart_s": took_s,
        "restart_cpu_s": cpu_s,
        "restart_slice_ms": longest_s * 1e3,
        "checkpoint_slice_ms": max(checkpoint_s) * 1e3,
        "checkpoint_ms": sum(checkpoint_s) * 1e3,
        "checkpoint_bytes": checkpoint_bytes,
        "switch_slice_ms": max(switch_s) * 1e3,
        "switch_ms": sum(switch_s) * 1e3,
        "loss_slice_ms": max(loss_s) * 1e3,
        "loss_ms": sum(loss_s) * 1e3,
        "memory_bytes": grown,
        **_micro("match", matches),
        **_micro("branch_event", events),
        "bare_us_p50": quietest(bare, 0.5) * 1e6,
        "bare_us_p99": quietest(bare, 0.99) * 1e6,
    }


def _micro(name: str, passes: list[list[float]]) -> dict[str, float]:
    """Microseconds of what was done once in each pass, in the same order."""
    quickest = [[min(seconds) for seconds in zip(*passes, strict=True)]]
    rounds = [part for seconds in passes for part in _rounds(seconds)]
    return {
        f"{name}_us_p50": quietest(quickest, 0.5) * 1e6,
        f"{name}_us_p99": quietest(quickest, 0.99) * 1e6,
        f"{name}_once_us_p50": quietest(rounds, 0.5) * 1e6,
        f"{name}_once_us_p99": quietest(rounds, 0.99) * 1e6,
    }


def _bare() -> float:
    """Seconds of a loop that touches nothing."""
    began = time.thread_time()
    for _ in range(1_000):
        pass
    return time.thread_time() - began


def _rounds(seconds: list[float]) -> list[list[float]]:
    return [seconds[at : at + ROUND] for at in range(0, len(seconds) - ROUND + 1, ROUND)] or [seconds]


def _restart(directory: Directory, cluster: Cluster) -> tuple[float, float, float]:
    """Bytes of all snapshots to a directory that sees; seconds of it, CPU seconds of it, and those of its longest slice
    of work, garbage collection included."""
    took = cpu = longest = 0.0
    clock = time.perf_counter
    for node in range(cluster.nodes):
        directory.on_location(KvLocation(node=f"n{node}", incarnation=1, seq=9, changes=[]), 0.0)
        for data in list(cluster.parts(node)):
            began, cpu_began = clock(), time.thread_time()
            directory.on_snapshot(SNAPSHOT_PART.decode(data), 0.0)
            longest = max([longest, *_slices(directory)])
            took, cpu = took + clock() - began, cpu + time.thread_time() - cpu_began
    began, cpu_began = clock(), time.thread_time()
    directory.see()
    longest = max([longest, *_slices(directory)])
    assert not directory.locations.unsynced()
    return took + clock() - began, cpu + time.thread_time() - cpu_began, longest


def _slices(directory: Directory) -> Iterator[float]:
    """CPU seconds of each slice of the work that was put off, as the service cuts it."""
    while directory.has_work:
        began = time.thread_time()
        helping(directory)
        yield time.thread_time() - began


def _saved(directory: Directory, cluster: Cluster, collections: ShortCollections) -> tuple[list[float], int]:
    """A checkpoint, with an event after each slice; CPU seconds of each slice, packing included, and bytes of all. What
    is new is looked at by the collector as often as the service does that, which counts as a slice too."""
    took, size, ended = list[float](), 0, False
    collections.tidy()
    began = time.thread_time()
    saving = Saving(directory)
    while not ended:
        part = helping_saved(saving, 0, 2.0, 0.0)
        size += len(frame(part))
        took.append(time.thread_time() - began)
        ended = part.end is not None
        _timed(directory, cluster, len(took) % len(cluster.tails), PASSES + 1 + len(took) // len(cluster.tails))
        began = time.thread_time()
        if len(took) % TIDY_SLICES == 0:
            collections.tidy()
            took.append(time.thread_time() - began)
            began = time.thread_time()
    saving.close()
    return took, size


def _switched(directory: Directory) -> list[float]:
    """A node goes from decode to prefill; CPU seconds of the command and of each slice after it."""
    command = PhaseCommand(id="c", t=0.0, node="n3", phase=Phase.PREFILL, epoch=1, reason="", decision_id="")
    began = time.thread_time()
    directory.on_phase(command)
    return [time.thread_time() - began, *_slices(directory)]


def _lost(directory: Directory, nodes: int) -> list[float]:
    """All nodes but one are heard of, some time after the last word; CPU seconds of that tick and of each slice."""
    later = 3.0 + directory.config.node_timeout_s
    for node in range(1, nodes):
        directory.on_location(KvLocation(node=f"n{node}", incarnation=1, seq=9, changes=[]), later)
    began = time.thread_time()
    directory.tick(later)
    took = [time.thread_time() - began, *_slices(directory)]
    assert not directory.locations.nodes["n0"].present
    return took


def _order(many: int) -> list[int]:
    """All branches, one far from the other."""
    return [number * 7919 % many for number in range(many)]


def _match(directory: Directory, cluster: Cluster, number: int) -> float:
    keys = cluster.context(number)
    began = time.thread_time()
    query = MatchQuery(request="r", branch=f"b{number}", hashes=keys)
    reply = directory.match(query, 2.0)
    took = time.thread_time() - began
    assert reply.blocks == DEPTH
    directory.match(MatchQuery(request="r", release=True), 2.0)
    return took


def _timed(directory: Directory, cluster: Cluster, number: int, turn: int) -> float:
    """A branch's context event, message bytes to claims: its whole context, then a turn of 2,000 tokens more each."""
    context = cluster.context(number)
    if turn:
        context += np.random.default_rng(number).integers(0, 1 << 64, TURN * turn, np.uint64).tobytes()
    blocks = DEPTH + TURN * turn
    base = max(DEPTH, blocks - TURN) if turn else 0
    event = BranchEvent(
        id=f"e{number}-{turn}",
        t=0.0,
        branch=f"b{number}",
        type=BranchEventType.CONTEXT,
        source="router",
        version=0,
        tip=int.from_bytes(context[-8:], "little"),
        blocks=blocks,
        base_blocks=base,
        base=int.from_bytes(context[8 * base - 8 : 8 * base], "little") if turn else None,
        keys=context[8 * base :] if turn else b"",
        prompt_blocks=base or DEPTH,
        prefill_node=f"n{number % cluster.nodes}",
        decode_node=f"n{(number * 7 + 3) % cluster.nodes}",
    )
    data = encode(event)
    began = time.thread_time()
    directory.on_branch_event(BRANCH_EVENT.decode(data), 1.0)
    return time.thread_time() - began


def _run(parent: int | None, keys: Any) -> LocationChange:
    return LocationChange(type=ChangeType.STORED, tier=Tier.L2, parent=parent, hashes=keys.tobytes())
