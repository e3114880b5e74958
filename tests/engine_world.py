"""A small cluster around the queue cores: messages that travel, engines that run, pools that pin; time by hand."""

from dataclasses import dataclass, field
from typing import Any

from schemas.phase import Phase, PhaseCommand, SwitchState
from schemas.serve import FetchSource, Finish, Handoff, HandoffReply, HandoffVerb, RequestState, Sampling, ServeRequest
from services.engine.backend import LegKey
from services.engine.core import effects as fx
from services.engine.core.limits import Limits
from services.engine.core.queueing import Queueing
from services.engine.core.timing import Coefficients

BLOCK = 4
ROUTER = "r0"


def request(
    id: str,  # noqa: A002
    phase: Phase,
    peer: str,
    *,
    attempt: int = 1,
    prompt: int = 16,
    new: int = 4,
    room: int | None = None,
    fetch: tuple[str, ...] = (),
    tokens: bool = True,
    deadline_s: float = 3600.0,
    router: str = ROUTER,
) -> ServeRequest:
    """One leg as a router would send it."""
    blocks = (prompt - 1) // BLOCK
    return ServeRequest(
        id=id,
        attempt=attempt,
        phase=phase,
        router=router,
        peer=peer,
        room=attempt if room is None else room,
        prompt_tokens=prompt,
        sampling=Sampling(max_new_tokens=new),
        tokens=bytes(4 * prompt) if tokens else b"",
        deadline_s=deadline_s,
        fetch=[FetchSource(node=node, first=0, last=blocks) for node in fetch],
    )


def limits(node: str, **changes: Any) -> Limits:
    """Limits of a small node: 96 tokens of device memory, batches of 16, 4 running."""
    base: dict[str, Any] = {
        "node": node,
        "block_size": BLOCK,
        "batch_tokens": 16,
        "l1_tokens": 96,
        "max_context_tokens": 64,
        "max_running": 4,
    }
    return Limits(**{**base, **changes})


@dataclass
class Inside:
    """A leg in the engine of a node."""

    need_tokens: int
    stage: int = 0
    token: int | None = None
    cancelled: bool = False


@dataclass
class Node:
    """A queue core, its engine and its pool."""

    name: str
    core: Queueing
    engine: dict[LegKey, Inside] = field(default_factory=dict)
    pool: set[str] = field(default_factory=set)
    reports: list[fx.Report] = field(default_factory=list)
    phases: list[fx.PhaseReport] = field(default_factory=list)
    dropped: int = 0
    given_up: int = 0
    alive: bool = True

    @property
    def room(self) -> int:
        return self.core.limits.l1_tokens - sum(leg.need_tokens for leg in self.engine.values())

    def finishes(self, id: str) -> list[tuple[int, Phase, Finish]]:  # noqa: A002
        return [(r.key.attempt, r.key.phase, r.finish) for r in self.reports if r.key.id == id and r.finish]

    def states(self, key: LegKey) -> list[RequestState]:
        return [r.state for r in self.reports if r.key == key and r.state]


class World:
    """Nodes and the messages between them. `pending` travels until `deliver` picks it; `settle` delivers everything."""

    def __init__(self, *names: str, **changes: Any) -> None:
        self.now = 0.0
        times = Coefficients(c1=0.01)
        self.nodes = {name: Node(name, Queueing.of(limits(name, **changes), times, f"{name}:1")) for name in names}
        self.pending: list[tuple[str, str, Any]] = []
        self.finished: set[tuple[str, LegKey]] = set()
        self.router_alive = True
        self.frozen_fetches = False
        self.cached_blocks = 0

    def serve(self, node: str, message: ServeRequest) -> Any:
        reply, effects = self.nodes[node].core.serve(message, self.now)
        self.perform(node, effects)
        return reply

    def pair(self, id: str, prefill: str, decode: str, **keys: Any) -> None:  # noqa: A002
        """Both legs of a request, as the router sends them."""
        fetch = keys.pop("fetch", ())
        self.serve(decode, request(id, Phase.DECODE, prefill, **keys))
        self.serve(prefill, request(id, Phase.PREFILL, decode, fetch=fetch, **keys))

    def cancel(self, node: str, id: str, attempt: int = 1, phase: Phase | None = None) -> bool:  # noqa: A002
        reply, effects = self.nodes[node].core.cancel(id, attempt, phase, self.now)
        self.perform(node, effects)
        return reply.known

    def command(self, node: str, phase: Phase, epoch: int) -> None:
        message = PhaseCommand(id="c", t=0, node=node, phase=phase, epoch=epoch, reason="test", decision_id=f"d{epoch}")
        self.perform(node, self.nodes[node].core.command(message, self.now))

    def tick(self, seconds: float = 0.02) -> None:
        """Let time pass: heartbeats of everybody alive, then a step of everybody alive."""
        self.now += seconds
        for node in self.nodes.values():
            if not node.alive:
                continue
            if self.router_alive:
                node.core.routers.seen(ROUTER, 1, self.now)
            for other in self.nodes.values():
                if other.alive:
                    node.core.nodes.seen(other.name, 1, self.now)
            self.step(node.name)

    def step(self, name: str) -> None:
        node = self.nodes[name]
        self.perform(name, node.core.step(self.now, node.room))

    def perform(self, name: str, effects: list[fx.Effect]) -> None:
        for effect in effects:
            self._perform(self.nodes[name], effect)
        self.nodes[name].core.check()

    def _perform(self, node: Node, effect: fx.Effect) -> None:
        match effect:
            case fx.ReadPrompt(key):
                self.pending.append(("prompt", node.name, key))
            case fx.Fetch(key, fetch_id, sources):
                node.pool.add(fetch_id)
                if not (self.frozen_fetches and sources):
                    self.pending.append(("fetched", node.name, fetch_id))
            case fx.Release(fetch_id):
                node.pool.discard(fetch_id)
            case fx.FetchGivenUp():
                node.given_up += 1
            case fx.Ask() | fx.Tell():
                self.pending.append(("ask" if isinstance(effect, fx.Ask) else "tell", node.name, effect))
            case fx.Submit(key):
                assert key not in node.engine
                leg = node.core.table.find(key)
                assert leg is not None
                shared = node.core.limits.shared_pair and key._replace(phase=Phase.DECODE) in node.engine
                need = 0 if shared and key.phase is Phase.PREFILL else leg.need_tokens
                node.engine[key] = Inside(need)
                assert node.room >= 0, f"device memory of {node.name} is overfull by {-node.room}"
            case fx.CancelInside(key):
                node.engine[key].cancelled = True
            case fx.Prefilled(key, token):
                assert node.engine[key].token is None, f"{key} was told twice that it is prefilled"
                node.engine[key].token = token
            case fx.Report(key):
                assert (node.name, key) not in self.finished, f"{effect} after the end of {key}"
                node.reports.append(effect)
                if effect.finish:
                    self.finished.add((node.name, key))
            case fx.PhaseReport():
                node.phases.append(effect)
            case fx.DropDecodeCache():
                node.dropped += 1
            case fx.Forget():
                pass

    def deliver(self, index: int, *, lost: bool = False) -> None:
        """Deliver one pending message; `lost`: it gets there, its answer does not come back."""
        kind, name, what = self.pending.pop(index % len(self.pending))
        retried = kind == "told again"
        node = self.nodes[name]
        if kind == "prompt":
            effects = node.core.prompt_lost(what, "lost", self.now) if lost else node.core.prompt_read(what)
        elif kind == "fetched":
            effects = node.core.fetched(what, self.cached_blocks)
        elif kind == "ask":
            effects = node.core.answered(what.number, self._handoff(node, what, HandoffVerb.RESERVE, lost), self.now)
        else:
            reply = self._handoff(node, what, what.verb, lost)
            effects = []
            if what.verb is HandoffVerb.DONE and lost and not retried:
                self.pending.append(("told again", name, what))
            elif what.verb is HandoffVerb.DONE:
                effects = node.core.told(what.key, "" if reply and reply.granted else "lost", self.now)
        self.perform(name, effects)

    def _handoff(self, node: Node, effect: Any, verb: HandoffVerb, lost: bool) -> HandoffReply | None:
        peer = self.nodes.get(effect.peer)
        if peer is None:
            return HandoffReply(granted=False, reason="gone")
        if not peer.alive:
            return None
        message = Handoff(
            verb=verb,
            id=effect.key.id,
            attempt=effect.key.attempt,
            node=node.name,
            room=effect.room,
            rendezvous=f"{node.name}:1",
            token=getattr(effect, "token", None),
        )
        reply, effects = peer.core.handoff(message, self.now, peer.room)
        self.perform(peer.name, effects)
        return None if lost else reply

    def advance(self, name: str, key: LegKey, *, error: bool = False) -> None:
        """One event of the engine about one leg inside."""
        node = self.nodes[name]
        inside = node.engine[key]
        if inside.cancelled or error:
            self._left(node, key, Finish.CANCELLED if inside.cancelled else Finish.ERROR)
        elif key.phase is Phase.PREFILL:
            inside.stage += 1
            if inside.stage == 1:
                self.perform(name, node.core.entered(key, RequestState.PREFILLING))
            elif inside.stage == 2:
                self.perform(name, node.core.first_token(key, 7))
                self.perform(name, node.core.entered(key, RequestState.TRANSFERRING))
            else:
                self._left(node, key, Finish.HANDED_OFF)
        elif inside.token is not None:
            inside.stage += 1
            if inside.stage == 1:
                self.perform(name, node.core.entered(key, RequestState.DECODING))
            else:
                self._left(node, key, Finish.STOP)

    def _left(self, node: Node, key: LegKey, finish: Finish) -> None:
        del node.engine[key]
        self.perform(node.name, node.core.left(key, finish, "", 0, 0, self.now))

    def enter(self) -> None:
        """Deliver everything that travels, twice: what may enter an engine is inside afterwards."""
        for _ in range(2):
            while self.pending:
                self.deliver(0)
            self.tick()
        while self.pending:
            self.deliver(0)

    def settle(self, seconds: float = 0.0) -> None:
        """Deliver everything and run all engines, until nothing moves any more (and `seconds` have passed)."""
        end = self.now + seconds
        while True:
            moved = bool(self.pending)
            while self.pending:
                self.deliver(0)
            for node in self.nodes.values():
                for key in list(node.engine) if node.alive else ():
                    before = (node.engine[key].stage, len(node.engine))
                    self.advance(node.name, key)
                    moved |= key not in node.engine or (node.engine[key].stage, len(node.engine)) != before
            self.tick()
            if not moved and not self.pending and self.now >= end:
                return

    def assert_no_orphans(self) -> None:
        """A decode leg keeps device memory only while its prefill leg is inside the engine of its peer."""
        for node in self.nodes.values():
            for key, inside in node.engine.items():
                leg = node.core.table.find(key)
                assert leg is not None
                if key.phase is Phase.DECODE and inside.token is None and not inside.cancelled:
                    other = self.nodes[leg.peer].engine.get(key._replace(phase=Phase.PREFILL))
                    assert other is not None, f"{key} on {node.name} waits for a prefill that will not come"

    def assert_empty(self) -> None:
        """Nothing is left of any leg: places, pins, reservations, engine."""
        for node in self.nodes.values():
            assert node.core.idle(), list(node.core.table.all())
            assert node.core.prefill.asks == {}
            assert node.core.table.pins == {}
            assert node.pool == set()
            assert node.engine == {}
            assert node.core.switch.draining == set()


SWITCHED = SwitchState.SWITCHED
