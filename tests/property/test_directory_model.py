"""The directory against a naive model: same placements, counts, matches and pool bits after any sequence of events,
whatever is lost, repeated, late or out of order."""

import random

import msgspec
from directory_model import Context, keys_of, pack
from directory_world import World
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from schemas.branch import BranchEvent, BranchEventType, BranchKind, Compaction
from schemas.directory import AbsenceReason, MatchQuery, MatchReply
from schemas.kv import Tier
from schemas.phase import Phase, PhaseCommand
from services.directory.core import match

NODES = ("p1", "p2", "d1")
BRANCHES = ("a", "b", "c", "d")
SAID_KINDS = (BranchKind.FORK, BranchKind.SUBAGENT, BranchKind.TRANSIENT)
SIGNALS = [kind for kind in BranchEventType if kind is not BranchEventType.CONTEXT]
nodes = st.sampled_from(NODES)
seeds = st.integers(0, 2**32)


class DirectoryMachine(RuleBasedStateMachine):
    """Three nodes and four branches; every message may be lost, come twice, late, or before another."""

    remember_blocks = 1_000_000

    def __init__(self) -> None:
        super().__init__()
        self.world = World(NODES, self.remember_blocks)
        self.running: list[tuple[MatchQuery, MatchReply | None, Context]] = []
        self.events: list[tuple[BranchEvent, Context]] = []
        self.unsent: list[tuple[BranchEvent, Context]] = []
        self.number = 0
        self.epochs = dict.fromkeys(NODES, 0)

    # nodes

    @rule(node=nodes, seed=seeds)
    def change(self, node: str, seed: int) -> None:
        self.world.say(node, random.Random(seed))

    @rule(node=nodes, seed=seeds)
    def change_and_deliver(self, node: str, seed: int) -> None:
        self.world.say(node, random.Random(seed))
        self.deliver_all(node)

    @rule(node=nodes, seed=seeds)
    def deliver_some(self, node: str, seed: int) -> None:
        """One of the messages on the way arrives, in whatever order; or it gets lost; or an old one comes again."""
        rnd, pool = random.Random(seed), self.world.pools[node]
        if pool.sent and rnd.random() < 0.3:
            self.world.deliver(rnd.choice(pool.sent))
        elif pool.on_the_way:
            message = pool.on_the_way.pop(rnd.randrange(len(pool.on_the_way)))
            if rnd.random() < 0.6:
                self.world.deliver(message)

    @rule(node=nodes)
    def deliver_all(self, node: str) -> None:
        waiting, self.world.pools[node].on_the_way = self.world.pools[node].on_the_way, []
        for message in waiting:
            self.world.deliver(message)

    @rule(node=nodes)
    def heartbeat(self, node: str) -> None:
        self.world.heartbeat(node)

    @rule(node=nodes, seed=seeds)
    def lose_silently(self, node: str, seed: int) -> None:
        if random.Random(seed).random() < 0.3:
            self.world.lose_silently(node, random.Random(seed))

    @rule(node=nodes, seed=seeds)
    def restart_node(self, node: str, seed: int) -> None:
        if random.Random(seed).random() < 0.2:
            self.world.pools[node].restart(clock_back=random.Random(seed + 1).random() < 0.3)

    @precondition(lambda self: self.world.asked)
    @rule(seed=seeds)
    def answer_snapshot(self, seed: int) -> None:
        rnd = random.Random(seed)
        self.world.answer(rnd.choice(sorted(self.world.asked)), rnd)

    @precondition(lambda self: self.world.asked)
    @rule(seed=seeds)
    def fail_snapshot(self, seed: int) -> None:
        self.world.fail(random.Random(seed).choice(sorted(self.world.asked)))

    @rule(seconds=st.sampled_from((0.1, 1.0, 6.0)))
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(node=nodes, phase=st.sampled_from(Phase), late=st.booleans())
    def switch(self, node: str, phase: Phase, late: bool) -> None:
        self.epochs[node] += not late
        command = PhaseCommand(
            id="c", t=0.0, node=node, phase=phase, epoch=self.epochs[node], reason="test", decision_id=""
        )
        self.world.command(command)

    @rule(steps=st.integers(0, 30))
    def save_some(self, steps: int) -> None:
        """A checkpoint is taken in pieces, between which anything may happen; the next restart is from it."""
        self.world.save_some(steps)

    @rule()
    def save_the_rest(self) -> None:
        self.world.finish_saving()

    @rule(seed=seeds)
    def restart_directory(self, seed: int) -> None:
        rnd = random.Random(seed)
        if rnd.random() < 0.3:
            self.world.restart(blind=rnd.random() < 0.6)

    # requests and branches

    @rule(branch=st.sampled_from(BRANCHES), seed=seeds)
    def ask(self, branch: str, seed: int) -> None:
        rnd, world = random.Random(seed), self.world
        prompt = self.next_prompt(branch, rnd)
        known = world.model.branches.get(branch)
        version = rnd.choice((known.version, known.version + 1, max(0, known.version - 1))) if known else 1
        self.number += 1
        query = MatchQuery(
            request=f"r{self.number}",
            hashes=pack(keys_of(prompt)),
            branch=branch,
            version=version if rnd.random() < 0.2 else None,
            parent=rnd.choice(BRANCHES) if rnd.random() < 0.2 else None,
            kind=rnd.choice(SAID_KINDS) if rnd.random() < 0.3 else None,
            compaction=rnd.choice(tuple(Compaction)) if rnd.random() < 0.3 else None,
        )
        reply = world.directory.match(query, world.now)
        if known is not None and known.state.value == "active":
            known.seen = world.now
        self.compare_match(query, prompt, reply)
        self.running.append((query, reply if rnd.random() < 0.9 else None, prompt))

    def next_prompt(self, branch: str, rnd: random.Random) -> Context:
        """Mostly what comes after the branch's context, its last blocks rewritten or not; else anything."""
        known = self.world.model.branches.get(branch)
        if known is None or known.claimed is None or rnd.random() < 0.3:
            return self.world.context(rnd)
        context = known.claimed.context
        prompt = context[: len(context) - rnd.randint(0, 3)] + tuple(rnd.randrange(3) for _ in range(rnd.randint(0, 4)))
        self.world.contexts.append(prompt)
        return prompt

    @precondition(lambda self: self.running)
    @rule(prefill=nodes, decode=nodes, seed=seeds)
    def answer_request(self, prefill: str, decode: str, seed: int) -> None:
        """A request is answered; its event arrives now, later, twice or never."""
        rnd = random.Random(seed)
        query, reply, prompt = self.running.pop(rnd.randrange(len(self.running)))
        context = prompt + tuple(rnd.randrange(3) for _ in range(rnd.randint(0, 3)))
        self.world.contexts.append(context)
        self.number += 1
        event = self.world.context_event(self.number, query, reply, prompt, context)
        event = msgspec.structs.replace(event, prefill_node=prefill, decode_node=decode)
        self.send(event, context, rnd)

    @precondition(lambda self: self.running)
    @rule(seed=seeds)
    def cancel_request(self, seed: int) -> None:
        query, _, _ = self.running.pop(random.Random(seed).randrange(len(self.running)))
        self.world.directory.match(MatchQuery(request=query.request, release=True), self.world.now)

    @rule(branch=st.sampled_from(BRANCHES), kind=st.sampled_from(SIGNALS), seed=seeds)
    def signal(self, branch: str, kind: BranchEventType, seed: int) -> None:
        rnd = random.Random(seed)
        if kind is BranchEventType.END and rnd.random() < 0.5:
            return
        known = self.world.model.branches.get(branch)
        version = rnd.choice((known.version, known.version + 1, max(0, known.version - 1))) if known else 1
        self.number += 1
        event = BranchEvent(
            id=f"e{self.number}",
            t=0.0,
            branch=branch,
            type=kind,
            parent=rnd.choice(BRANCHES) if rnd.random() < 0.7 else None,
            version=version if rnd.random() < 0.3 else None,
            cascade=rnd.random() < 0.6,
        )
        self.send(event, (), rnd)

    def send(self, event: BranchEvent, context: Context, rnd: random.Random) -> None:
        self.events.append((event, context))
        fate = rnd.random()
        if fate < 0.8:
            self.world.tell(event, context)
        elif fate < 0.95:
            self.unsent.append((event, context))

    @precondition(lambda self: self.events)
    @rule(seed=seeds)
    def repeat_event(self, seed: int) -> None:
        self.world.tell(*random.Random(seed).choice(self.events))

    @precondition(lambda self: self.unsent)
    @rule(seed=seeds)
    def late_event(self, seed: int) -> None:
        self.world.tell(*self.unsent.pop(random.Random(seed).randrange(len(self.unsent))))

    # what must hold

    @invariant()
    def parts_agree(self) -> None:
        self.world.directory.check()

    @invariant()
    def placements_and_counts_are_the_models(self) -> None:
        world = self.world
        for node, tiers in world.placed().items():
            assert tiers == world.model.view[node]
            for key in tiers[Tier.L1] | tiers[Tier.L2]:
                assert world.count(node, key) == world.model.count(node, key), (node, key)

    @invariant()
    def branches_are_the_models(self) -> None:
        found = {
            branch.key[1]: (branch.version, branch.state, branch.kind, branch.parent[1] if branch.parent else None)
            for branch in self.world.directory.branches.newest_first()
        }
        assert found == {
            name: (branch.version, branch.state, branch.kind, branch.parent)
            for name, branch in self.world.model.branches.items()
        }

    @rule(seed=seeds)
    def match_anything(self, seed: int) -> None:
        prompt = self.world.context(random.Random(seed))
        query = MatchQuery(request="probe", hashes=pack(keys_of(prompt)))
        self.compare_match(query, prompt, self.world.directory.match(query, self.world.now))
        self.world.directory.match(MatchQuery(request="probe", release=True), self.world.now)

    def compare_match(self, query: MatchQuery, prompt: Context, reply: MatchReply) -> None:
        model, keys = self.world.model, keys_of(prompt)

        def lead(held: set[int]) -> int:
            return next((number for number, key in enumerate(keys) if key not in held), len(keys))

        l2 = {node: model.view[node][Tier.L2] for node in NODES}
        assert reply.blind == self.world.directory.blind
        assert reply.blocks == lead(set().union(*l2.values()))
        ends = [0, *(piece.last for piece in reply.pieces)]
        assert [piece.first for piece in reply.pieces] == ends[:-1]
        assert ends[-1] == reply.blocks
        for piece in reply.pieces:
            assert piece.nodes
            assert piece.first < piece.last
            assert all(key in l2[node] for node in piece.nodes for key in keys[piece.first : piece.last])
        leads = {match.node: (match.l1_blocks, match.l2_blocks) for match in reply.nodes}
        for node in NODES:
            assert leads.get(node, (0, 0)) == (lead(model.view[node][Tier.L1]), lead(l2[node]))
        self.compare_known(reply, lead(model.known))
        self.compare_absent(reply, keys)
        known = model.branches.get(query.branch or "")
        if known is not None:
            assert (reply.lineage, reply.version) == model.judge(known, query.version, prompt, query)
            assert reply.life == known.life
            if known.claimed is not None:
                own = keys_of(known.claimed.context)
                assert reply.branch_blocks == lead(set(own))

    def compare_known(self, reply: MatchReply, known: int) -> None:
        assert reply.known_blocks == known

    def compare_absent(self, reply: MatchReply, keys: list[int]) -> None:
        """Every block that is known and not supplied has the model's reason. A node's loss is worked off in pieces, so
        what it held may be said to be lost although the same node evicted it since."""
        found = {n: piece.reason for piece in reply.absent for n in range(piece.first, piece.last)}
        assert list(found) == list(range(reply.blocks, reply.known_blocks))
        for number, reason in found.items():
            expected = self.world.model.absence(keys[number])
            lost = reason is AbsenceReason.NODE_LOST and keys[number] in self.world.model.ever_lost
            assert reason is expected or lost, (number, reason, expected)

    @rule(seed=seeds)
    def repair(self, seed: int) -> None:
        """When nothing is on the way any more the directory knows the truth, and so do the pools."""
        world = self.world
        world.repair(random.Random(seed))
        for node, pool in world.pools.items():
            view = world.placed()[node]
            assert view == {tier: set(held) for tier, held in pool.held.items()}
            for key, context in pool.held[Tier.L2].items():
                covered = all(world.model.holders(above) for above in keys_of(context))
                expected = (world.model.count(node, key) > 0, not covered)
                assert pool.bits[key] == expected, (node, context)

    def teardown(self) -> None:
        """When all branches have ended every count is zero."""
        world = self.world
        for name, branch in list(world.model.branches.items()):
            self.number += 1
            world.tell(
                BranchEvent(
                    id=f"end{self.number}", t=0.0, branch=name, type=BranchEventType.END, version=branch.version
                ),
                (),
            )
        for node, tiers in world.placed().items():
            assert all(world.count(node, key) == 0 for key in tiers[Tier.L1] | tiers[Tier.L2])
        assert world.directory.stats().claims == 0
        assert all(not run.claims for run in world.directory.tree.known())
        world.directory.check()


class ForgetfulMachine(DirectoryMachine):
    """The same with hardly any memory for what lies nowhere: all but what is known of the unknown stays true."""

    remember_blocks = 3

    def compare_known(self, reply: MatchReply, known: int) -> None:
        assert reply.blocks <= reply.known_blocks <= known

    def compare_absent(self, reply: MatchReply, keys: list[int]) -> None:
        """Reasons are forgotten with the keys."""

    @invariant()
    def memory_is_bounded(self) -> None:
        assert self.world.directory.tree.idle_blocks <= self.remember_blocks


class CrowdedMachine(DirectoryMachine):
    """The same with so few nodes taken for many that most of what is seen is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.few, match.FEW_HOLDINGS = match.FEW_HOLDINGS, 1

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            match.FEW_HOLDINGS = self.few


COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck)}
TestDirectoryMachine = DirectoryMachine.TestCase
TestDirectoryMachine.settings = settings(max_examples=50, stateful_step_count=50, **COMMON)
TestCrowdedMachine = CrowdedMachine.TestCase
TestCrowdedMachine.settings = settings(max_examples=30, stateful_step_count=50, **COMMON)
TestForgetfulMachine = ForgetfulMachine.TestCase
TestForgetfulMachine.settings = settings(max_examples=30, stateful_step_count=50, **COMMON)
