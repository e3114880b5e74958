"""The directory: where every known block lies, who claims it, and what a request is to its branch.

Messages and time in, effects and answers out. A message costs what it carries; whatever could take longer is left to
`work`, which the shell calls in small helpings while `has_work`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from schemas.branch import BranchEvent, BranchEventType, BranchInfo
from schemas.directory import BranchQuery, MatchQuery, MatchReply, StatsReply
from schemas.kv import KvLocation, NodeHello, SnapshotPart, Tier
from schemas.phase import Phase, PhaseCommand
from schemas.telemetry import RouterTelemetry
from services.directory.core.announcements import Announcements
from services.directory.core.branch_events import BranchEvents
from services.directory.core.branches import Branches
from services.directory.core.copies import Copies
from services.directory.core.counters import Counters
from services.directory.core.effects import Effect, ReferencesChanged
from services.directory.core.locations import Locations
from services.directory.core.match import Supply
from services.directory.core.matching import Matching
from services.directory.core.pending import PendingPrefixes
from services.directory.core.prefix_tree import PrefixTree
from services.directory.core.reachability import Reachability
from services.directory.core.references import References
from services.directory.core.routers import Routers
from services.directory.core.run import keys_view
from services.directory.core.values import Values

_DONE = object()


@dataclass(frozen=True)
class DirectoryConfig:
    """Bounds and times. `remember_blocks`: keys known beyond those that lie somewhere or are claimed. A node where
    claimed blocks take `scarce_share` of the host memory is told what each is worth; at a depth of
    `depth_doubling_tokens` a block counts twice as much as at the start of a context, for what it costs to compute
    again (half the weight that GLM-5.2's coefficients give it, see decision 0006)."""

    remember_blocks: int = 4_000_000
    branch_lease_s: float = 1800.0
    pending_lease_s: float = 600.0
    node_timeout_s: float = 3.0
    inactive_branches: int = 100_000
    event_ids: int = 100_000
    buffer_messages: int = 8192
    scarce_share: float = 0.8
    depth_doubling_tokens: int = 500_000


class Directory:
    """`blind` after a restart: until the shell calls `see`, answers say so, and pools are told nothing that might be
    wrong because not everything is known yet. Phase commands of that time wait for the copies they ask about."""

    def __init__(self, config: DirectoryConfig, incarnation: int, *, blind: bool = False) -> None:
        self.config = config
        self.incarnation = incarnation
        self.blind = blind
        self.counters = Counters()
        self.phases: dict[str, tuple[Phase, int]] = {}
        self.tree = PrefixTree()
        self.announcements = Announcements()
        self.references = References(self.tree, self.announcements)
        self.reachability = Reachability(self.tree, self.announcements)
        self.pending = PendingPrefixes(config.pending_lease_s)
        self.routers = Routers(config.node_timeout_s)
        self.branches = Branches(self.references, config.branch_lease_s, config.inactive_branches)
        self.events = BranchEvents(self.references, self.branches, self.pending, self.counters, config.event_ids)
        self.values = Values(self.announcements.hosts, config.scarce_share, config.depth_doubling_tokens)
        self.references.on_claim.append(self.values.claimed)
        self.tree.on_attach.append(self.values.attached)
        copies = Copies(self.tree, self.references, self.reachability, self.announcements, self.counters)
        copies.on_copy.append(self.values.came)
        self.locations = Locations(
            copies,
            self.announcements.hosts,
            self.counters,
            timeout_s=config.node_timeout_s,
            buffer_messages=config.buffer_messages,
        )
        self._matching = Matching(self.tree, self.branches, self.pending)
        self._shares: dict[str, float] = {}
        self._waiting_commands: list[PhaseCommand] = []

    def on_location(self, message: KvLocation, now: float) -> list[Effect]:
        """Location changes of one node, or its pool's heartbeat."""
        return self.on_locations((message,), now)

    def on_locations(self, messages: Iterable[KvLocation], now: float) -> list[Effect]:
        """Several of them, in the order they came: cheaper than one by one."""
        self.locations.on_locations(messages, now)
        return self._effects()

    def on_snapshot(self, part: SnapshotPart, now: float) -> list[Effect]:
        """One part of a snapshot that was asked for; loaded by `work`."""
        self.locations.on_snapshot(part, now)
        return self._effects()

    def on_snapshot_failed(self, node: str, now: float) -> None:
        """The node did not answer; it is asked again later."""
        self.locations.on_snapshot_failed(node, now)

    def on_hello(self, hello: NodeHello, now: float) -> list[Effect]:
        """A node says what it is."""
        self.locations.on_hello(hello, now)
        return self._effects()

    def on_branch_event(self, event: BranchEvent, now: float) -> list[Effect]:
        """What happened to a branch: the only messages that change claims, with phase commands."""
        self.values.now = now
        news = event.id not in self.events.applied
        self.events.apply(event, now)
        if news and event.type is BranchEventType.CONTEXT:
            self.values.answered(self.branches.get((event.tenant, event.branch)), event.request, event.finish)
        return self._effects()

    def on_phase(self, command: PhaseCommand) -> list[Effect]:
        """A node's phase is ordered. Only going to prefill changes claims; an epoch not above the last one nothing."""
        if self.blind:
            self._waiting_commands.append(command)
            return []
        old, epoch = self.phases.get(command.node, (None, -1))
        if command.epoch > epoch:
            self.phases[command.node] = (command.phase, command.epoch)
            if command.phase is Phase.PREFILL and old is not Phase.PREFILL:
                self.locations.jobs.append(self.references.switch(command.node))
        return self._effects()

    def on_router(self, beat: RouterTelemetry, now: float) -> list[Effect]:
        """A router lives. What it asked in a former life is over."""
        if self.routers.seen(beat.router, beat.incarnation, now):
            self.locations.jobs.append(self._forgotten(self.pending.requests(beat.router)))
        return self._effects()

    def _forgotten(self, requests: list[str]) -> Iterator[None]:
        """Nobody will say what became of these."""
        for request in requests:
            if self.pending.release(request) is not None:
                self.values.released(request)
                self.counters.expired_requests += 1
            yield

    def placement(self, hashes: bytes) -> Supply:
        """Where the longest prefix of these packed keys lies: what a match says of it, without a request."""
        return self.tree.sights.supply(self.tree.walk(keys_view(hashes)))

    def match(self, query: MatchQuery, now: float) -> MatchReply:
        """Where the longest prefix lies; cost by the runs of this request only."""
        self.counters.matches += 1
        self.values.now = now
        if query.router and self.routers.seen(query.router, query.incarnation, now):
            self.locations.jobs.append(self._forgotten(self.pending.requests(query.router)))
        reply, branch = self._matching.match(query, self._shares, self.blind, now)
        if branch is not None:
            self.values.asked(branch, query.request, reply.lineage)
        elif query.release:
            self.values.released(query.request)
        return reply

    def list_references(self, node: str) -> list[Effect]:
        """A pool lost track of which of its copies are referenced: tell it all, in helpings of `work`."""
        if not self.blind:
            self.locations.list_references(node)
        return self._effects()

    def see(self) -> list[Effect]:
        """All that was said before is known now: act on it, and tell every pool."""
        self.blind = False
        waiting, self._waiting_commands = self._waiting_commands, []
        effects = [effect for command in waiting for effect in self.on_phase(command)]
        for node in self.locations.nodes:
            self.locations.list_references(node)
        return effects + self._effects()

    def stand_by(self) -> list[Effect]:
        """Another directory is asked from now on, and told how requests end."""
        self.locations.jobs.append(self._forgotten(self.pending.requests()))
        return self._effects()

    def speak(self, incarnation: int) -> list[Effect]:
        """Serve under a new incarnation: every pool is told everything anew."""
        self.incarnation = incarnation
        for node in self.locations.nodes:
            self.list_references(node)
        return self._effects()

    def tick(self, now: float) -> list[Effect]:
        """Once a second: lost nodes, leases that are over, snapshots to ask again."""
        self.locations.tick(now)
        self.counters.expired_requests += self.pending.expire(now)
        for router in self.routers.gone(now):
            self.locations.jobs.append(self._forgotten(self.pending.requests(router)))
        holdings = ((node.name, node.holdings[Tier.L2]) for node in self.locations.nodes.values() if node.present)
        self._shares = {name: holding.referenced / holding.blocks for name, holding in holdings if holding.blocks}
        if self.branches.overdue(now):
            self.locations.jobs.append(self._demote(now))
        self.values.now = now
        self.locations.jobs.extend(self.values.tick(node.hello for node in self.locations.nodes.values() if node.hello))
        return self._effects()

    def _demote(self, now: float) -> Iterator[None]:
        while self.branches.overdue(now):
            self.branches.demote()
            self.counters.demoted_branches += 1
            yield

    @property
    def has_work(self) -> bool:
        return bool(
            self.locations.jobs
            or self.references.leaving
            or self.reachability.stale
            or self.values.due
            or self.tree.idle_blocks > self.config.remember_blocks
        )

    def work(self, steps: int) -> list[Effect]:
        """Do up to `steps` bounded pieces of what was put off: a run, a branch or a change each."""
        jobs = self.locations.jobs
        for _ in range(steps):
            if jobs:
                if next(jobs[0], _DONE) is _DONE:
                    jobs.popleft()
            elif not (
                self.references.step()
                or self.reachability.step()
                or self.values.step()
                or self.tree.forget(self.config.remember_blocks)
            ):
                break
        return self._effects()

    def listed(self, query: BranchQuery, now: float, wall: float) -> list[BranchInfo]:
        """Branches, newest first; `wall` is the Unix time at monotonic `now`."""
        if query.branch is not None:
            branch = self.branches.get((query.tenant, query.branch))
            found = [] if branch is None else [branch]
        else:
            ours = (branch for branch in self.branches.newest_first() if branch.key[0] == query.tenant)
            found = [branch for branch, _ in zip(ours, range(query.limit), strict=False)]
        hello = next((node.hello for node in self.locations.nodes.values() if node.hello and node.present), None)
        block_size = hello.block_size if hello is not None else 0
        return [
            BranchInfo(
                id=branch.key[1],
                parent=branch.parent[1] if branch.parent is not None else None,
                kind=branch.kind,
                version=branch.version,
                state=branch.state,
                inferred=branch.inferred,
                confidence=branch.confidence,
                tokens=branch.blocks * block_size,
                blocks=branch.blocks,
                last_seen=wall - (now - branch.seen),
            )
            for branch in found
        ]

    def stats(self) -> StatsReply:
        holdings = {node.name: node.holdings[Tier.L2].blocks for node in self.locations.nodes.values()}
        return StatsReply(
            incarnation=self.incarnation,
            blocks=self.tree.blocks,
            copies=sum(holdings.values()),
            claims=self.references.claimed_blocks,
            branches=len(self.branches),
            active_branches=self.branches.active,
            pending=len(self.pending),
            resyncs=self.counters.resyncs,
            duplicates=self.counters.duplicate_events,
            blind=self.blind,
            nodes=holdings,
        )

    def _effects(self) -> list[Effect]:
        effects, said, values = self.locations.effects, self.announcements.waiting, self.values.take()
        if effects:
            self.locations.effects = []
        if said:
            self.announcements.waiting = []
        if self.blind:
            return [effect for effect in effects if not isinstance(effect, ReferencesChanged)]
        return [*effects, *said, *values]

    def check(self) -> None:
        """Assert the invariants of every part, and that claims and counters are what the branches say."""
        self.tree.check()
        self.references.check(self.branches.newest_first())
        self.branches.check()
        self.pending.check()
        self.locations.check()
        self.announcements.check()
        self.values.check({branch.key for branch in self.branches.newest_first() if branch.claim is not None})
        if not self.has_work:
            self.reachability.check()
