"""Any order of events, losses and failures: each request ends once, with the right tokens, and nothing stays held."""

import hashlib
from dataclasses import dataclass, field

from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from schemas.block_key import PLAIN, token_bytes, token_list
from schemas.directory import MatchReply
from schemas.kv import Capacities, NodeHello
from schemas.phase import Phase, PhaseCommand
from schemas.serve import Finish, LegUpdate, ReplyBatch, RequestState, Sampling, ServeReply
from schemas.telemetry import KvUse, NodeTelemetry, TierUse
from services.router.core.admission import Limits
from services.router.core.context import Context, KeyScheme
from services.router.core.effects import (
    AskAgain,
    AskDirectory,
    CancelLeg,
    Effect,
    EmitTokens,
    End,
    ReleaseMatch,
    SendLeg,
    StoreContext,
)
from services.router.core.identity import Identity
from services.router.core.router import RouterCore
from services.router.core.spec import Spec

BLOCK = 4
SCHEME = KeyScheme(BLOCK, PLAIN)
NAMES = ("n0", "n1", "n2")
Key = tuple[str, int, Phase]


def next_token(context: list[int]) -> int:
    """What every node answers to a context: a function of all of it."""
    return int.from_bytes(hashlib.sha256(token_bytes(context)).digest()[:2], "big")


def right_answer(prompt: list[int], tokens: int) -> list[int]:
    context = list(prompt)
    for _ in range(tokens):
        context.append(next_token(context))
    return context[len(prompt) :]


@dataclass
class Held:
    """A leg as an engine holds it."""

    prompt: list[int]
    limit: int
    peer: str
    room: int
    state: RequestState = RequestState.QUEUED
    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None


@dataclass
class Engine:
    """An engine that prefills, hands off and decodes when told to, and remembers what it sent."""

    name: str
    phase: Phase = Phase.BOTH
    epoch: int = 0
    incarnation: int = 1
    alive: bool = True
    legs: dict[Key, Held] = field(default_factory=dict)
    over: dict[Key, Held] = field(default_factory=dict)

    def serve(self, leg: SendLeg) -> ServeReply:
        key = (leg.request, leg.attempt, leg.phase)
        if key in self.over:
            return ServeReply(accepted=False, epoch=self.epoch, reason="unknown")
        if key in self.legs:
            held = self.legs[key]
            if held.state is not RequestState.QUEUED:
                return ServeReply(accepted=False, epoch=self.epoch, reason="handed_off")
            held.peer, held.room = leg.peer, leg.room
        elif not self.phase.serves(leg.phase):
            return ServeReply(accepted=False, epoch=self.epoch, reason="phase")
        else:
            self.legs[key] = Held(token_list(leg.prompt), leg.sampling.max_new_tokens, leg.peer, leg.room)
        return ServeReply(accepted=True, epoch=self.epoch)

    def end(self, key: Key, finish: Finish) -> None:
        self.over[key] = self.legs.pop(key)
        self.over[key].finish = finish

    def update(self, key: Key, seq: int = 0, *, state: bool = False) -> LegUpdate:
        held = self.legs.get(key) or self.over[key]
        return LegUpdate(
            id=key[0],
            attempt=key[1],
            phase=key[2],
            state=held.state if state else None,
            seq=seq,
            tokens=token_bytes(held.tokens[seq:]),
            finish=held.finish,
            cached_tokens=0 if key[2] is Phase.PREFILL else None,
        )


class RouterAndEngines(RuleBasedStateMachine):
    """The core against engines behind a network that delays, drops, repeats and reorders what may be lost."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.core = RouterCore(Limits(10_000), rooms_from=7, node_timeout_s=1.0)
        self.engines = {name: Engine(name) for name in NAMES}
        self.effects: list[Effect] = []
        self.updates: list[ReplyBatch] = []
        self.prompts: dict[str, tuple[list[int], int]] = {}
        self.got: dict[str, list[int]] = {}
        self.ends: dict[str, End] = {}
        self.closed: dict[str, int] = {}
        self.rooms: dict[int, tuple[str, int]] = {}
        self.beat()

    def do(self, effects: list[Effect]) -> None:
        """Tokens and ends happen at once; messages wait in `effects` for the network."""
        for effect in effects:
            if isinstance(effect, EmitTokens):
                assert effect.request not in self.ends
                self.got[effect.request] += effect.tokens
            elif isinstance(effect, End):
                assert effect.request not in self.ends, "ended twice"
                self.ends[effect.request] = effect
            elif isinstance(effect, ReleaseMatch | StoreContext):
                self.closed[effect.request] = self.closed.get(effect.request, 0) + 1
            elif isinstance(effect, AskDirectory | SendLeg | CancelLeg | AskAgain):
                self.effects.append(effect)
                if isinstance(effect, SendLeg):
                    owner = self.rooms.setdefault(effect.room, (effect.request, effect.attempt))
                    assert owner == (effect.request, effect.attempt), "a room of two attempts"

    def first_of_its_subject(self, drawn: Effect) -> Effect:
        """Messages of one sender to one subject keep their order; only those of different subjects overtake."""
        if not isinstance(drawn, SendLeg):
            return drawn
        same = (effect for effect in self.effects if isinstance(effect, SendLeg) and effect.node == drawn.node)
        return next(same)

    def beat(self) -> None:
        kv = KvUse(l1=TierUse(used=0, total=1000), l2=TierUse(used=0, total=1000))
        for engine in self.engines.values():
            if engine.alive:
                hello = NodeHello(
                    node=engine.name,
                    incarnation=1,
                    engine_incarnation=engine.incarnation,
                    model="m",
                    block_size=BLOCK,
                    key_version=PLAIN,
                    ranks=1,
                    engine="timed",
                    dtype="fp32",
                    capacities=Capacities(l1_tokens=1000, l2_tokens=1000),
                    transfer="",
                )
                self.do(self.core.on_hello(hello, self.now))
                telemetry = NodeTelemetry(
                    node=engine.name,
                    t=0,
                    incarnation=1,
                    phase=engine.phase,
                    epoch=engine.epoch,
                    waiting=len(engine.legs),
                    running=0,
                    kv=kv,
                    last_kv_seq=0,
                    engine_incarnation=engine.incarnation,
                )
                self.do(self.core.on_telemetry(telemetry, self.now))

    def send(self, engine: Engine, key: Key, seq: int = 0) -> None:
        batch = ReplyBatch(node=engine.name, incarnation=1, t=0, updates=[engine.update(key, seq, state=True)])
        self.updates.append(batch)

    def perform(self, effect: Effect, *, lost: bool) -> None:
        """One message reaches its receiver, and its answer comes back; `lost`: it does not."""
        if isinstance(effect, AskDirectory):
            names = [None, None, *self.prompts, "another router's"]
            ahead = names[(len(self.effects) + 3 * len(self.updates)) % len(names)]
            blocks = 0 if ahead is None else 200
            found = MatchReply(blocks=0, branch=effect.request, version=1, pending_blocks=blocks, pending_request=ahead)
            match = None if lost else found
            self.do(self.core.on_match(effect.request, effect.attempt, match, self.now))
            return
        assert isinstance(effect, SendLeg | CancelLeg | AskAgain)
        engine = self.engines[effect.node]
        if isinstance(effect, SendLeg):
            reply = engine.serve(effect) if engine.alive else None
            reply = None if lost else reply
            self.do(self.core.on_answer(effect.request, effect.phase, effect.node, effect.attempt, reply, self.now))
        elif isinstance(effect, CancelLeg) and engine.alive and effect.phase is not None:
            key = (effect.request, effect.attempt, effect.phase)
            if key in engine.legs:
                engine.end(key, Finish.CANCELLED)
        elif isinstance(effect, AskAgain) and engine.alive and not lost:
            key = (effect.request, effect.attempt, effect.phase)
            if key in engine.legs or key in engine.over:
                self.send(engine, key, effect.seq)
            else:
                unknown = (effect.request, effect.phase, effect.node, effect.attempt)
                self.do(self.core.on_leg_unknown(*unknown, self.now))

    def step(self, engine: Engine, key: Key) -> None:
        """One iteration of one leg: a prefill hands off to the held decode leg, a decode gives one more token."""
        held = engine.legs[key]
        if key[2] is Phase.PREFILL:
            peer = self.engines[held.peer]
            decode = peer.legs.get((key[0], key[1], Phase.DECODE))
            if not peer.alive or decode is None or decode.room != held.room:
                return
            held.tokens = decode.tokens = [next_token(held.prompt)]
            held.state = RequestState.TRANSFERRING
            decode.state = RequestState.DECODING
            single = held.limit == 1
            engine.end(key, Finish.LENGTH if single else Finish.HANDED_OFF)
            self.send(engine, key)
            if single:
                self.abort(peer, key)
        elif held.state is RequestState.DECODING:
            held.tokens = [*held.tokens, next_token(held.prompt + held.tokens)]
            seq = len(held.tokens) - 1 if len(held.tokens) > 2 else 0
            if len(held.tokens) >= held.limit:
                engine.end(key, Finish.LENGTH)
            self.send(engine, key, seq)

    def abort(self, peer: Engine, key: Key) -> None:
        """The prefill engine tells the decode engine that nothing will come."""
        held = (key[0], key[1], Phase.DECODE)
        if held in peer.legs:
            peer.end(held, Finish.CANCELLED)
            self.send(peer, held, len(peer.over[held].tokens))

    def legs(self) -> list[tuple[Engine, Key]]:
        return [(engine, key) for engine in self.engines.values() if engine.alive for key in engine.legs]

    @rule(prompt=st.lists(st.integers(0, 99), min_size=1, max_size=14), tokens=st.integers(1, 6))
    def submit(self, prompt: list[int], tokens: int) -> None:
        name = f"r{len(self.prompts)}"
        self.prompts[name], self.got[name] = (prompt, tokens), []
        spec = Spec(name, Identity(""), Context.of(token_bytes(prompt), SCHEME), Sampling(max_new_tokens=tokens))
        self.do(self.core.submit(spec, self.now))

    @precondition(lambda self: self.effects)
    @rule(data=st.data(), lost=st.booleans())
    def deliver_effect(self, data: st.DataObject, lost: bool) -> None:
        drawn = self.effects[data.draw(st.integers(0, len(self.effects) - 1))]
        self.effects.remove(first := self.first_of_its_subject(drawn))
        self.perform(first, lost=lost)

    @precondition(lambda self: self.updates)
    @rule(data=st.data(), fate=st.sampled_from(("deliver", "deliver", "deliver", "repeat", "drop")))
    def deliver_update(self, data: st.DataObject, fate: str) -> None:
        index = data.draw(st.integers(0, len(self.updates) - 1))
        batch = self.updates[index] if fate == "repeat" else self.updates.pop(index)
        if fate != "drop":
            self.do(self.core.on_reply(batch, self.now))

    @precondition(lambda self: self.legs())
    @rule(data=st.data())
    def iterate(self, data: st.DataObject) -> None:
        self.step(*data.draw(st.sampled_from(self.legs())))

    @precondition(lambda self: self.legs())
    @rule(data=st.data(), finish=st.sampled_from((Finish.ERROR, Finish.REQUEUED, Finish.CANCELLED)))
    def break_leg(self, data: st.DataObject, finish: Finish) -> None:
        engine, key = data.draw(st.sampled_from(self.legs()))
        if finish is not Finish.REQUEUED or engine.legs[key].state is RequestState.QUEUED:
            peer = self.engines[engine.legs[key].peer]
            engine.end(key, finish)
            self.send(engine, key, len(engine.over[key].tokens))
            if key[2] is Phase.PREFILL:
                self.abort(peer, key)

    @rule(name=st.sampled_from(NAMES))
    def kill(self, name: str) -> None:
        engine = self.engines[name]
        engine.alive = False
        engine.legs.clear()
        engine.over.clear()

    @rule(name=st.sampled_from(NAMES))
    def start_again(self, name: str) -> None:
        engine = self.engines[name]
        if not engine.alive:
            engine.alive, engine.incarnation = True, engine.incarnation + 1

    @rule(name=st.sampled_from(NAMES), phase=st.sampled_from(Phase), known=st.booleans())
    def command(self, name: str, phase: Phase, known: bool) -> None:
        """The node obeys at once; the router may hear of it only with the next heartbeat."""
        engine = self.engines[name]
        engine.epoch, engine.phase = engine.epoch + 1, phase
        for key, held in list(engine.legs.items()):
            if held.state is RequestState.QUEUED and not phase.serves(key[2]):
                engine.end(key, Finish.REQUEUED)
                self.send(engine, key)
        if known:
            self.core.on_command(
                PhaseCommand(id="c", t=0, node=name, phase=phase, epoch=engine.epoch, reason="", decision_id="")
            )

    @precondition(lambda self: self.core.requests)
    @rule(data=st.data(), stop=st.booleans())
    def end_early(self, data: st.DataObject, stop: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.core.requests)))
        self.do(self.core.on_stop(name, self.now) if stop else self.core.on_cancel(name, self.now))

    @rule(seconds=st.sampled_from((0.05, 0.4, 1.5, 6.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.beat()
        self.do(self.core.tick(self.now))

    @invariant()
    def sound(self) -> None:
        self.core.check()

    @invariant()
    def nothing_is_overlooked(self) -> None:
        """A request that is not looked at before a moment has nothing to do before it."""
        for request in self.core.requests.values():
            if request.look_at > self.now:
                assert request.tick(self.now) == []

    def teardown(self) -> None:
        """The network heals and every node serves both phases: all must end, right and with nothing held."""
        for engine in self.engines.values():
            self.start_again(engine.name)
            engine.epoch, engine.phase = engine.epoch + 1, Phase.BOTH
        for _ in range(400):
            while self.effects or self.updates:
                while self.effects:
                    self.perform(self.effects.pop(0), lost=False)
                while self.updates:
                    self.do(self.core.on_reply(self.updates.pop(0), self.now))
            if not self.core.requests:
                break
            for engine, key in self.legs():
                if key in engine.legs:
                    self.step(engine, key)
            self.wait(0.25)
        self.core.check()
        self.judge()

    def judge(self) -> None:
        assert set(self.ends) == set(self.prompts), "a request that never ended"
        assert all(self.closed[name] == 1 for name in self.ends)
        assert not [key for engine in self.engines.values() for key in engine.legs], "a leg that nobody cancelled"
        assert all(self.core.ledger.wait(name, self.now) == (0.0, 0.0) for name in NAMES)
        assert all(self.core.ledger.decoding(name) == (0, 0) for name in NAMES)
        for name, (prompt, tokens) in self.prompts.items():
            expected = right_answer(prompt, tokens)
            record = self.ends[name].record
            event(f"{record.outcome} after {min(record.attempts, 4)} attempts")
            assert self.got[name] == expected[: len(self.got[name])], "wrong tokens"
            assert record.output_tokens == len(self.got[name])
            if record.outcome == "length":
                assert self.got[name] == expected


RouterAndEngines.TestCase.settings = settings(
    max_examples=120, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestRouterAndEngines = RouterAndEngines.TestCase
