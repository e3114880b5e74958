"""Where blocks lie: location events and snapshots of all nodes applied to the tree, lost messages and nodes noticed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from schemas.directory import AbsenceReason
from schemas.kv import ChangeType, KvLocation, NodeHello, SnapshotPart, Tier
from services.directory.core.copies import Copies, Holdings
from services.directory.core.counters import Counters
from services.directory.core.effects import Effect, NeedSnapshot, NodeLost, NodeRefused, ReferencesChanged
from services.directory.core.node import Joined, Node, Staged, mismatch
from services.directory.core.node_feed import Arrival
from services.directory.core.run import Holding, Run

ORPHAN_GRACE_S = 0.25
"""How long an unknown parent may stay unknown before a snapshot is asked: events of a node may overtake each other."""
ORPHAN_AGAIN_S = 60.0
DRIFT_AGAIN_S = 60.0
FORGET_NODE_S = 3600.0
"""A node that is gone for so long is forgotten by name."""


class Locations:
    """Effects gather in `effects`. What would take long (sweeping a dead holding, loading a snapshot, listing
    references) is a job in `jobs`: an iterator whose every step does a bounded piece of it. `hosts` is kept in step
    with the L2 holdings of every node."""

    def __init__(
        self,
        copies: Copies,
        hosts: dict[str, list[Holding]],
        counters: Counters,
        *,
        timeout_s: float,
        buffer_messages: int,
    ) -> None:
        self.nodes: dict[str, Node] = {}
        self.effects: list[Effect] = []
        self.jobs: deque[Iterator[None]] = deque()
        self._copies = copies
        self._hosts = hosts
        self._counters = counters
        self._timeout_s = timeout_s
        self._buffer_messages = buffer_messages

    def on_locations(self, messages: Iterable[KvLocation], now: float) -> None:
        """Messages as they came. Runs that one node stored in pieces, one behind the other, are applied as one."""
        joined: Joined | None = None
        for message in messages:
            node = self.nodes.get(message.node) or self._node(message.node, now)
            if node.refused:
                self._counters.refused_locations += 1
                continue
            step = node.feed.offer(message)
            if step.arrival is not Arrival.LATE:
                node.heard, node.lost = now, False
            if step.arrival is not Arrival.APPLIED or step.new_life:
                self._count(step.arrival)
                self._done(joined, now)
                joined = None
                if step.new_life:
                    self._renew(node)
            if step.arrival is Arrival.APPLIED:
                change = message.changes[0]
                if joined is not None and len(message.changes) == 1 and joined.goes_on(node, change):
                    continue
                self._done(joined, now)
                joined = None
                if len(message.changes) == 1 and change.type is ChangeType.STORED and not change.media:
                    joined = Joined(node, change)
                else:
                    self._apply(node, message, now)
            elif step.arrival is Arrival.HEARTBEAT:
                self._compare(node, message, now)
            if not node.feed.synced:
                self._repair(node, "gap")
        self._done(joined, now)

    def on_snapshot(self, part: SnapshotPart, now: float) -> None:
        node = self.nodes.get(part.node)
        if node is None or not node.asked or node.feed.is_late(part.incarnation):
            self._counters.stray_snapshot_parts += 1
            return
        node.heard, node.lost = now, False
        if node.staged is None or node.staged.ident != part.snapshot:
            self._discard(node)
            node.staged = Staged(node.name, part.snapshot, part.incarnation, part.seq)
            self._hosts[node.name].append(node.staged.holdings[Tier.L2])
        self.jobs.append(self._load(node, node.staged, part, now))

    def on_snapshot_failed(self, name: str, now: float) -> None:
        node = self.nodes.get(name)
        if node is not None and node.asked:
            self._discard(node)
            node.failed(now)

    def on_hello(self, hello: NodeHello, now: float) -> None:
        """Refuse a node unlike those that are here; ask a new one what it holds."""
        node = self._node(hello.node, now)
        if not node.feed.is_late(hello.incarnation):
            node.heard, node.lost = now, False
        peers = (peer.hello for peer in self.nodes.values() if peer is not node and peer.present and peer.hello)
        expected = next(peers, None)
        node.hello, refused = hello, "" if expected is None else mismatch(hello, expected)
        if refused:
            if refused != node.refused:
                self.effects.append(NodeRefused(node.name, refused))
            node.refused = refused
            self._renew(node)
            node.feed.doubt()
            return
        if node.refused or node.feed.incarnation is None:
            node.refused = ""
            node.feed.doubt()
        self._repair(node, "hello")

    def tick(self, now: float) -> None:
        for node in list(self.nodes.values()):
            if node.refused or node.lost:
                if now - node.heard > FORGET_NODE_S:
                    del self.nodes[node.name], self._hosts[node.name]
                continue
            if now - node.heard > self._timeout_s:
                node.lost = True
                self.effects.append(NodeLost(node.name, now - node.heard))
                self._renew(node)
                node.feed.fall_silent()
            elif node.retry_at is not None and now >= node.retry_at:
                node.retry_at = None
                self._repair(node, "retry")
            elif node.suspects:
                self._examine(node, now)

    def list_references(self, name: str) -> None:
        """Tell a node's pool the state of all its copies anew."""
        node = self.nodes.get(name)
        if node is not None and node.present:
            self.jobs.append(self._listing(node))

    def unsynced(self) -> list[str]:
        """Nodes that are here but not known completely."""
        return [node.name for node in self.nodes.values() if node.present and not node.synced]

    def _node(self, name: str, now: float) -> Node:
        node = self.nodes.get(name)
        if node is None:
            node = self.nodes[name] = Node(name, self._buffer_messages, now)
            self._hosts[name] = [node.holdings[Tier.L2]]
        return node

    def _count(self, arrival: Arrival) -> None:
        self._counters.duplicate_locations += arrival is Arrival.DUPLICATE
        self._counters.late_locations += arrival is Arrival.LATE
        self._counters.overflowed_locations += arrival is Arrival.OVERFLOW

    def _repair(self, node: Node, reason: str) -> None:
        """Ask for one snapshot if one is needed and none is under way."""
        if node.present and not node.feed.synced and not node.asked and node.retry_at is None:
            node.asked = True
            node.asks += 1
            self._counters.resyncs += 1
            self.effects.append(NeedSnapshot(node.name, reason))

    def _examine(self, node: Node, now: float) -> None:
        """Orphans that did not find their parent in time call for a snapshot; once, and not again for a while."""
        node.suspects = {run: since for run, since in node.suspects.items() if run.orphan_of is not None and run.keys}
        waited = any(now - since >= ORPHAN_GRACE_S for since in node.suspects.values())
        if waited and (node.suspects_asked_at is None or now - node.suspects_asked_at >= ORPHAN_AGAIN_S):
            node.suspects_asked_at = now
            node.feed.doubt()
            self._repair(node, "unknown parent")

    def _compare(self, node: Node, beat: KvLocation, now: float) -> None:
        """A node of which nothing is missing holds what it says, or something went wrong: an emptied tier is believed,
        anything else calls for a snapshot; once, and not again for a while."""
        if not node.synced or beat.seq != node.feed.seq:
            return
        for tier, total in ((Tier.L1, beat.l1), (Tier.L2, beat.l2)):
            held = node.holdings[tier]
            if total is None or (total.blocks, total.digest) == (held.blocks, held.digest):
                continue
            self._counters.drifted_nodes += 1
            if not total.blocks:
                self._empty(node, tier)
            elif node.drift_asked_at is None or now - node.drift_asked_at >= DRIFT_AGAIN_S:
                node.drift_asked_at = now
                node.feed.doubt()
                self._repair(node, "drift")
                return

    def _empty(self, node: Node, tier: Tier) -> None:
        self._bury(node.holdings[tier], AbsenceReason.EVICTED)
        self._install(node, node.holdings | {tier: Holding(node.name, tier, live=True)})

    def _apply(self, node: Node, message: KvLocation, now: float) -> None:
        for change in message.changes:
            if change.type is ChangeType.CLEARED:
                self._empty(node, change.tier)
            elif change.type is ChangeType.REMOVED:
                self._copies.removed(change.tier, change.hashes, node.holdings)
            else:
                self._suspect(node, self._copies.stored(change, change.hashes, node.holdings), now)

    def _done(self, joined: Joined | None, now: float) -> None:
        """Apply what was joined so far."""
        if joined is not None:
            parts = joined.parts
            packed = parts[0] if len(parts) == 1 else b"".join(parts)
            self._suspect(joined.node, self._copies.stored(joined.change, packed, joined.node.holdings), now)

    def _suspect(self, node: Node, orphan: Run | None, now: float) -> None:
        if orphan is not None:
            self._counters.unknown_parents += 1
            node.suspects.setdefault(orphan, now)

    def _load(self, node: Node, staged: Staged, part: SnapshotPart, now: float) -> Iterator[None]:
        asks = node.asks
        for change in part.changes:
            if node.staged is not staged:
                return
            if change.type is ChangeType.REMOVED:
                self._copies.removed(change.tier, change.hashes, staged.holdings)
            elif change.type is not ChangeType.CLEARED:
                self._copies.stored(change, change.hashes, staged.holdings)
            yield
        if part.next_cursor is not None or node.staged is not staged or not self._commit(node, staged, now):
            return
        while node.asked and node.asks == asks and (message := node.feed.following()) is not None:
            self._apply(node, message, now)
            yield
        if node.asked and node.asks == asks:
            node.repaired()
            self._repair(node, "gap")

    def _commit(self, node: Node, staged: Staged, now: float) -> bool:
        """A snapshot is complete: it takes the place of what we knew, unless that is newer."""
        if not node.feed.wants(staged.incarnation, staged.seq):
            self._discard(node)
            node.asked = False
            if not node.feed.synced:
                node.failed(now)
            return False
        for holding in node.holdings.values():
            self._bury(holding, AbsenceReason.EVICTED)
        for holding in staged.holdings.values():
            self._copies.revive(holding)
        self._install(node, staged.holdings)
        self.jobs.extend(self._copies.reach(holding) for holding in staged.holdings.values())
        node.feed.loaded(staged.incarnation, staged.seq)
        node.staged = None
        node.suspects.clear()
        self.list_references(node.name)
        return True

    def _discard(self, node: Node) -> None:
        """Give up a snapshot that is being loaded."""
        if node.staged is not None:
            self._hosts[node.name].remove(node.staged.holdings[Tier.L2])
            for holding in node.staged.holdings.values():
                self._bury(holding, None)
            node.staged = None

    def _renew(self, node: Node) -> None:
        """The node holds nothing any more."""
        self._discard(node)
        node.repaired()
        for holding in node.holdings.values():
            self._bury(holding, AbsenceReason.NODE_LOST)
        self._install(node, {tier: Holding(node.name, tier, live=True) for tier in Tier})

    def _install(self, node: Node, holdings: Holdings) -> None:
        node.holdings = holdings
        staged = [node.staged.holdings[Tier.L2]] if node.staged is not None else []
        self._hosts[node.name] = [holdings[Tier.L2], *(h for h in staged if h is not holdings[Tier.L2])]

    def _bury(self, holding: Holding, reason: AbsenceReason | None) -> None:
        self._copies.bury(holding, reason)
        if holding.runs:
            self.jobs.append(self._copies.sweep(holding))

    def _listing(self, node: Node) -> Iterator[None]:
        self.effects.append(ReferencesChanged(node.name, referenced=False, unreachable=False, keys=b"", full=True))
        yield from self._copies.retell(node.holdings[Tier.L2])

    def check(self) -> None:
        for node in self.nodes.values():
            node.feed.check()
            assert not (node.refused or node.lost) or not any(holding.blocks for holding in node.holdings.values())
            assert all(holding.live for holding in node.holdings.values())
            staged = [node.staged.holdings[Tier.L2]] if node.staged is not None else []
            assert self._hosts[node.name] == [node.holdings[Tier.L2], *staged]
            assert node.asked or node.staged is None
