"""Nodes, routers and a bus around a directory and its model: messages of both, and everything that goes wrong."""

import random
from collections.abc import Iterable

from directory_model import Context, Model, key_of, keys_of, pack
from directory_nodes import Feed, Pool

from schemas.branch import BranchEvent, BranchEventType
from schemas.directory import MatchQuery, MatchReply
from schemas.kv import ChangeType, KvLocation, LocationChange, SnapshotPart, Tier
from schemas.kv import keys_of as unpack
from schemas.phase import PhaseCommand
from services.directory.core.checkpoint import Part, Saving
from services.directory.core.directory import Directory, DirectoryConfig
from services.directory.core.effects import Effect, NeedSnapshot, NodeLost, ReferencesChanged
from services.directory.core.run import Run, path
from tests.directory_checkpoint import links, put_back, rest_of, said, taken, through_disk

LEASE_S, NODE_TIMEOUT_S = 40.0, 15.0


class World:
    """`directory` and `model` are told the same, in the same order; `asked` nodes owe a snapshot."""

    def __init__(self, nodes: tuple[str, ...], remember_blocks: int) -> None:
        self.now = 1000.0
        config = DirectoryConfig(
            remember_blocks=remember_blocks,
            branch_lease_s=LEASE_S,
            node_timeout_s=NODE_TIMEOUT_S,
            pending_lease_s=60.0,
        )
        self.directory = Directory(config, incarnation=1)
        self.model = Model(nodes, LEASE_S)
        self.pools = {node: Pool() for node in nodes}
        self.feeds = {node: Feed() for node in nodes}
        self.heard: dict[str, float] = {}
        self.contexts: list[Context] = [()]
        self.asked: set[str] = set()
        self.unheard: set[str] = set()
        self.commands: list[PhaseCommand] = []
        self.snapshots = 0
        self.saving: Saving | None = None
        self.saved: list[Part] = []

    def perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, NeedSnapshot):
                assert effect.node not in self.asked, "a second snapshot was asked while one is under way"
                self.asked.add(effect.node)
                self.feeds[effect.node].synced = False
            elif isinstance(effect, ReferencesChanged):
                assert not self.directory.blind, "a pool was told something before all was known"
                self.pools[effect.node].told(effect)
            elif isinstance(effect, NodeLost):
                assert self.now - self.heard[effect.node] > NODE_TIMEOUT_S
                self.forget(effect.node)
                self.feeds[effect.node].fall_silent()

    def forget(self, node: str) -> None:
        """The model's view of the node is void, and so is a snapshot under way."""
        self.model.lost(node)
        self.asked.discard(node)

    def drain(self) -> None:
        while self.directory.has_work:
            self.perform(self.directory.work(7))
        if self.directory.blind and self.unheard.isdisjoint(self.pools) and not self.directory.locations.unsynced():
            commands, self.commands = self.commands, []
            for command in commands:
                self.model.phase(command.node, command.phase, command.epoch)
            self.perform(self.directory.see())
            self.drain()

    def command(self, command: PhaseCommand) -> None:
        """A phase command; what it means for claims waits until a directory that has started anew sees."""
        if self.directory.blind:
            self.commands.append(command)
        else:
            self.model.phase(command.node, command.phase, command.epoch)
        self.perform(self.directory.on_phase(command))
        self.drain()

    def context(self, rnd: random.Random, most: int = 6) -> Context:
        """Something that was there before, cut, and something new: labels are few, so that paths meet."""
        base = rnd.choice(self.contexts[-30:])
        context = base[: rnd.randint(0, len(base))] + tuple(rnd.randrange(3) for _ in range(rnd.randint(0, most)))
        self.contexts.append(context)
        return context

    # what nodes do and say

    def change(self, node: str, rnd: random.Random) -> LocationChange | None:
        """Something happens on a node; the change it reports."""
        pool, tier = self.pools[node], rnd.choice(tuple(Tier))
        context = self.context(rnd)
        if not context:
            return None
        first = rnd.randint(0, len(context) - 1) if rnd.random() < 0.5 else 0
        last = rnd.randint(first + 1, len(context))
        piece = {key_of(context[: end + 1]): context[: end + 1] for end in range(first, last)}
        parent = key_of(context[:first]) if first else None
        choice = rnd.random()
        if choice < 0.55:
            pool.put(tier, piece)
            return LocationChange(type=ChangeType.STORED, tier=tier, parent=parent, hashes=pack(list(piece)))
        if choice < 0.9:
            gone = [key for key in piece if key in pool.held[tier]]
            gone = gone or rnd.sample(list(pool.held[tier]), min(len(pool.held[tier]), 3))
            pool.take(tier, gone)
            return LocationChange(type=ChangeType.REMOVED, tier=tier, hashes=pack(gone))
        if choice < 0.98:
            origin = Tier.L1 if tier is Tier.L2 else Tier.L2
            if any(key not in pool.held[origin] for key in piece):
                return None
            pool.put(tier, piece)
            pool.take(origin, piece)
            hashes = pack(list(piece))
            return LocationChange(type=ChangeType.MOVED, tier=tier, origin=origin, parent=parent, hashes=hashes)
        pool.take(tier, list(pool.held[tier]))
        return LocationChange(type=ChangeType.CLEARED, tier=tier)

    def say(self, node: str, rnd: random.Random) -> None:
        """A node changes and puts the message on its way."""
        changes = [change for _ in range(rnd.randint(1, 4)) if (change := self.change(node, rnd)) is not None]
        if changes:
            pool = self.pools[node]
            pool.seq += 1
            message = KvLocation(node=node, incarnation=pool.incarnation, seq=pool.seq, changes=changes)
            pool.on_the_way.append(message)
            pool.sent.append(message)

    def heartbeat(self, node: str) -> None:
        """The pool repeats its last number and says what it holds as of it."""
        pool = self.pools[node]
        l1, l2 = pool.total(Tier.L1), pool.total(Tier.L2)
        self.deliver(KvLocation(node=node, incarnation=pool.incarnation, seq=pool.seq, changes=[], l1=l1, l2=l2))

    def lose_silently(self, node: str, rnd: random.Random) -> None:
        """Blocks of a node are gone and nobody said so."""
        pool, tier = self.pools[node], rnd.choice(tuple(Tier))
        held = list(pool.held[tier])
        pool.take(tier, held if rnd.random() < 0.4 else rnd.sample(held, len(held) // 2))

    def deliver(self, message: KvLocation) -> None:
        node, feed = message.node, self.feeds[message.node]
        if not feed.is_late(message.incarnation):
            self.heard[node], feed.silent = self.now, False
            if message.incarnation != feed.incarnation:
                if feed.incarnation:
                    self.forget(node)
                feed.begin(message.incarnation)
        behind = False
        self.unheard.discard(node)
        if not message.changes and feed.synced and (message.incarnation, message.seq) == (feed.incarnation, feed.seq):
            self.believe_total(message)
        if message.incarnation == feed.incarnation and message.seq > feed.seq:
            if message.changes and feed.synced and message.seq == feed.seq + 1:
                feed.seq += 1
                self.believe(message)
            else:
                behind = True
                if message.changes:
                    feed.waiting[message.seq] = message
        self.perform(self.directory.on_location(message, self.now))
        self.drain()
        if behind:
            feed.synced = False
            retry = self.directory.locations.nodes[node].retry_at
            assert node in self.asked or retry is not None, "messages were lost and no snapshot was asked"

    def believe(self, message: KvLocation) -> None:
        """The model takes in a message in order."""
        node = message.node
        for change in message.changes:
            keys = unpack(change.hashes).tolist()
            if change.type is ChangeType.CLEARED:
                self.model.emptied(node, change.tier)
            elif change.type is ChangeType.REMOVED:
                self.model.removed(node, change.tier, keys)
            else:
                self.model.stored(node, change.tier, keys)
                if change.origin is not None:
                    self.model.removed(node, change.origin, keys)

    def believe_total(self, beat: KvLocation) -> None:
        """The model hears that a tier is empty; any other difference calls for a snapshot."""
        pool = self.pools[beat.node]
        for tier in (Tier.L1, Tier.L2):
            if self.model.view[beat.node][tier] != pool.held[tier].keys():
                if pool.held[tier]:
                    return
                self.model.emptied(beat.node, tier)

    def answer(self, node: str, rnd: random.Random) -> None:
        """A node's dump as of now, in parts, block by block in any order; what is on the way may be older."""
        pool, feed = self.pools[node], self.feeds[node]
        if feed.is_late(pool.incarnation):
            self.refuse(node, rnd)
            return
        self.asked.discard(node)
        self.heard[node] = self.now
        for tier in Tier:
            self.model.emptied(node, tier)
            self.model.stored(node, tier, list(pool.held[tier]))
        if pool.incarnation != feed.incarnation:
            feed.begin(pool.incarnation)
        feed.seq = pool.seq
        feed.waiting = {seq: message for seq, message in feed.waiting.items() if seq > feed.seq}
        assert not feed.waiting, "a message is newer than the node's own count"
        feed.synced, feed.silent = True, False
        for part in self.parts(node, rnd):
            self.perform(self.directory.on_snapshot(part, self.now))
        self.drain()

    def refuse(self, node: str, rnd: random.Random) -> None:
        """The dump of a life whose clock went back, while the one before it is not known to be over."""
        for part in self.parts(node, rnd):
            self.perform(self.directory.on_snapshot(part, self.now))

    def parts(self, node: str, rnd: random.Random) -> list[SnapshotPart]:
        pool = self.pools[node]
        changes = [
            LocationChange(
                type=ChangeType.STORED,
                tier=tier,
                hashes=pack([key]),
                parent=key_of(context[:-1]) if context[:-1] else None,
            )
            for tier in Tier
            for key, context in pool.held[tier].items()
        ]
        rnd.shuffle(changes)
        cuts = sorted(rnd.randint(0, len(changes)) for _ in range(rnd.randint(0, 3)))
        self.snapshots += 1
        return [
            SnapshotPart(
                node=node,
                incarnation=pool.incarnation,
                seq=pool.seq,
                snapshot=f"s{self.snapshots}",
                changes=changes[first:last],
                next_cursor=None if last == len(changes) and number == len(cuts) else number + 1,
            )
            for number, (first, last) in enumerate(zip([0, *cuts], [*cuts, len(changes)], strict=True))
        ]

    def fail(self, node: str) -> None:
        self.asked.discard(node)
        self.directory.on_snapshot_failed(node, self.now)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.perform(self.directory.tick(self.now))
        self.model.tick(self.now)
        self.drain()

    def repair(self, rnd: random.Random) -> None:
        """Until nothing is owed: heartbeats show what was lost, and snapshots bring it."""
        for pool in self.pools.values():
            pool.on_the_way.clear()
        for number in range(20):
            for node in self.pools:
                self.heartbeat(node)
            for node in list(self.asked):
                self.answer(node, rnd)
            views = self.placed()
            if (
                not self.directory.blind
                and not self.directory.locations.unsynced()
                and all(
                    views[node] == {tier: set(held) for tier, held in pool.held.items()}
                    for node, pool in self.pools.items()
                )
            ):
                return
            self.pass_time(1.0 if number < 10 else 10.0)
        raise AssertionError(f"not repaired: {self.directory.locations.unsynced()}")

    def save_some(self, steps: int) -> None:
        """A checkpoint is begun, or goes on for some pieces."""
        if self.saving is None and not self.directory.blind:
            self.saving = Saving(self.directory)
        if self.saving is not None:
            for _ in range(steps):
                self.saving.step()
            self.saved.append(through_disk(self.saving.take()))

    def finish_saving(self) -> list[Part]:
        """All parts of the checkpoint under way, or of one taken at once: it says what is so now, of every branch and
        of every block but for what was forgotten meanwhile."""
        saving, parts = self.saving, self.saved
        if saving is None:
            return taken(self.directory, self.now, self.now)
        self.saving, self.saved = None, []
        parts = [*parts, *rest_of(saving, self.now, self.now)]
        now = taken(self.directory, self.now, self.now)
        assert said(parts) == said(now)
        assert links(parts) >= links(now)
        return parts

    def restart(self, *, blind: bool) -> None:
        """The directory starts again from its checkpoint; where copies lie it hears anew. Blind, it tells the pools
        nothing until it has heard all of them. A blind one keeps no checkpoint, so it is not restarted here."""
        if self.directory.blind:
            return
        parts = self.finish_saving()
        self.directory = Directory(self.directory.config, incarnation=self.directory.incarnation + 1, blind=blind)
        self.unheard = set(self.pools)
        put_back(self.directory, parts, self.now, self.now)
        for node in self.pools:
            self.forget(node)
            self.feeds[node] = Feed()
        self.model.why.clear()
        self.drain()

    # what routers and harnesses say

    def tell(self, event: BranchEvent, context: Context) -> None:
        self.model.event(event, context, self.now)
        self.perform(self.directory.on_branch_event(event, self.now))
        self.drain()

    def context_event(
        self, number: int, query: MatchQuery, reply: MatchReply | None, prompt: Context, context: Context
    ) -> BranchEvent:
        """What a router stores when a request was answered; without a reply it was placed blind."""
        keys = keys_of(context)
        base = 0 if reply is None else min(reply.branch_blocks, len(keys))
        version = query.version if reply is None else reply.version
        return BranchEvent(
            id=f"e{number}",
            t=0.0,
            branch=query.branch or (reply.branch if reply is not None and reply.branch else "inferred"),
            type=BranchEventType.CONTEXT,
            source="router",
            parent=query.parent if reply is None else reply.parent,
            kind=query.kind,
            version=version,
            request=query.request,
            tip=keys[-1] if keys else None,
            blocks=len(keys),
            base_blocks=base,
            base=keys[base - 1] if base else None,
            keys=pack(keys[base:]),
            prompt_blocks=len(prompt),
            lineage="" if reply is None else reply.lineage,
            life=None if reply is None else reply.life,
            compaction=query.compaction,
        )

    # what came of it

    def placed(self) -> dict[str, dict[Tier, set[int]]]:
        """The directory's view, per node and tier."""
        found: dict[str, dict[Tier, set[int]]] = {}
        for name, node in self.directory.locations.nodes.items():
            found[name] = {
                tier: {
                    run.keys[offset]
                    for run in holding.runs
                    for first, last in zip(run.held[holding][::2], run.held[holding][1::2], strict=True)
                    for offset in range(first, last)
                }
                for tier, holding in node.holdings.items()
            }
        return found

    def count(self, node: str, key: int) -> int:
        """The directory's count of a copy."""
        place = self.directory.tree.find(key)
        return sum(self.directory.references.claims(*place, node).values()) if place is not None else 0

    def ancestors(self, key: int) -> list[int]:
        """Keys of all blocks before this one that the directory knows, itself included."""
        place = self.directory.tree.find(key)
        assert place is not None
        tip: tuple[Run, int] = (place[0], place[1] + 1)
        return [run.keys[offset] for run, end in path(tip) for offset in range(end)]
