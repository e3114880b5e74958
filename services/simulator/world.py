"""The simulated cluster: nodes, requests and the system that decides, in virtual time."""

import random
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from schemas.phase import Phase, Split
from services.engine.core.timing import PrefillTerms
from services.simulator.call import Call
from services.simulator.clock import Agenda
from services.simulator.hardware import Hardware
from services.simulator.migration import migrate
from services.simulator.node import Node
from services.simulator.system import (
    Action,
    EngineListener,
    KvListener,
    Migrate,
    Move,
    NodeView,
    Place,
    Preload,
    System,
    Withdraw,
)
from services.simulator.tier import KeyRun

PREFILL, DECODE = Phase.PREFILL, Phase.DECODE
NO_KEYS = array("Q")
"""What an answered call is left with: a run has tens of thousands of them."""


@dataclass(slots=True)
class Switch:
    """One change of the split: nodes moved together. `ended_at` None while it goes on."""

    started_at: float
    before: str
    after: str
    nodes: set[str]
    reason: str
    counts: bool = True
    ended_at: float | None = None


class Watch:
    """Whoever records what happens; the default does not."""

    def answered(self, call: Call) -> None: ...

    def prefill_iterated(
        self, node: str, terms: PrefillTerms, cached_tokens: int, duration_s: float, now: float
    ) -> None: ...

    def decode_iterated(
        self, node: str, count: int, requests: int, context_tokens: float, duration_s: float, now: float
    ) -> None: ...

    def switched(self, switch: Switch) -> None: ...

    def preloaded(self, tokens: int, now: float) -> None: ...


@dataclass(slots=True)
class _Relaunch:
    phase: Phase | None
    until: float
    capture_s: float
    keeps_kv: bool


class World:
    """Carries out what the system decides. `finished` is called with every answered request.

    Deterministic: the same arguments give the same run.
    """

    def __init__(
        self,
        hardware: Hardware,
        split: Split,
        system: System,
        *,
        seed: int = 0,
        block_tokens: int = 64,
        watch: Watch | None = None,
    ) -> None:
        self.agenda = Agenda()
        hardware = hardware if system.traits.speculates else hardware.without_speculation()
        self.hardware, self.system, self.block_tokens = hardware, system, block_tokens
        self.batch_tokens, self.times = hardware.batch_tokens, hardware.times
        self.watch = watch or Watch()
        self._listeners: list[EngineListener] = [self.watch]
        if isinstance(system, EngineListener):
            self._listeners.append(system)
        self.finished: Callable[[Call, float], None] = lambda call, now: None
        self.switches: list[Switch] = []
        self.open_calls = 0
        self._random = random.Random(seed)
        self._produced = bytearray()
        self._relaunching: dict[str, _Relaunch] = {}
        self._wake_at: float | None = None
        listens = system if isinstance(system, KvListener) else None
        phases = [PREFILL] * split.prefill + [DECODE] * split.decode
        width = len(str(len(phases) - 1))
        self._nodes = {
            name: Node(name, phase, self, system.traits, listens)
            for name, phase in ((f"n{i:0{width}}", phase) for i, phase in enumerate(phases))
        }
        system.begin(self, 0.0)
        self._plan_wake(0.0)

    # what systems see

    @property
    def nodes(self) -> Mapping[str, NodeView]:
        return self._nodes

    def node(self, name: str | None) -> Node:
        assert name is not None
        return self._nodes[name]

    def serving(self, phase: Phase) -> Sequence[Node]:
        return [node for node in self._nodes.values() if node.phase is not None and node.phase.serves(phase)]

    def draw(self) -> float:
        return self._random.random()

    def refer(self, node: str, runs: Sequence[KeyRun], *, referenced: bool, unreachable: bool) -> None:
        """The directory's word on copies in a node's host memory."""
        self._nodes[node].memory.l2.refer(runs, referenced=referenced, unreachable=unreachable)

    def value(self, node: str, runs: Sequence[KeyRun], value: int, *, referenced: bool) -> None:
        """What the directory says copies in a node's host memory are worth."""
        self._nodes[node].memory.l2.value(runs, value, referenced=referenced)

    @property
    def split(self) -> str:
        """Nodes by the phase they serve now."""
        return str(Split(*(sum(node.phase is phase for node in self._nodes.values()) for phase in (PREFILL, DECODE))))

    # requests

    def arrive(self, call: Call, now: float) -> None:
        """A new request."""
        self.open_calls += 1
        call.ideal_blocks = self._known(call.keys, (call.prompt_tokens - 1) // self.block_tokens)
        self._do(self.system.arrived(call, now), now)

    def _known(self, keys: "array[int]", limit: int) -> int:
        """How many leading blocks somebody has produced; a produced block proves those before it."""
        low, high, produced = 0, min(limit, len(keys)), self._produced
        while low < high:
            middle = (low + high + 1) // 2
            key = keys[middle - 1]
            if key < len(produced) and produced[key]:
                low = middle
            else:
                high = middle - 1
        return low

    def _produce(self, keys: "array[int]") -> None:
        produced = self._produced
        if keys and max(keys) >= len(produced):
            produced.extend(bytes(max(keys) + (1 << 20) - len(produced)))
        for key in keys:
            produced[key] = 1

    def _do(self, actions: Iterable[Action], now: float) -> None:
        for action in actions:
            if isinstance(action, Place):
                self._place(action, now)
            elif isinstance(action, Withdraw):
                self._withdraw(action.call, now)
            elif isinstance(action, Migrate):
                source = self.node(action.call.decode_node)
                migrate(self.agenda, action.call, source, self._nodes[action.node], now)
            elif isinstance(action, Preload):
                node = self._nodes[action.node]
                tokens = node.prefixes.preload(action.branch, action.keys, node.prefill_calls.values(), now)
                self.watch.preloaded(tokens, now)
        self._move([action for action in actions if isinstance(action, Move)], now)
        self._plan_wake(now)

    def _plan_wake(self, now: float) -> None:
        due = self.system.next_wake(now)
        if due is not None and (self._wake_at is None or due < self._wake_at):
            self._wake_at = due
            self.agenda.at(due, self._wake)

    def _wake(self, now: float) -> None:
        if self._wake_at is not None and now >= self._wake_at:
            self._wake_at = None
            self._do(self.system.wake(now), now)

    def _place(self, place: Place, now: float) -> None:
        call = place.call
        assert call.prefill_node is None, f"{call.id} has a place already"
        call.attempt += 1
        call.prefill_node, call.decode_node, call.placed_at = place.prefill, place.decode, now
        call.cached_tokens = call.restored_tokens = call.fetched_tokens = call.preloaded_tokens = 0
        if call.predicted_ttft_s is None and place.predicted_ttft_s is not None:
            call.predicted_ttft_s = now - call.arrived_at + place.predicted_ttft_s
        taken = self._nodes[place.decode].take(place, DECODE, now)
        if not taken or not self._nodes[place.prefill].take(place, PREFILL, now):
            self._withdraw(call, now)
            self.agenda.at(now + 0.05, lambda at: self._do(self.system.arrived(call, at), at))

    def _withdraw(self, call: Call, now: float) -> None:
        prefill, decode = call.prefill_node, call.decode_node
        call.prefill_node = call.decode_node = None
        if prefill is not None and decode is not None:
            self._nodes[prefill].withdraw(call, PREFILL, now)
            self._nodes[decode].withdraw(call, DECODE, now)

    def give_back(self, call: Call, phase: Phase, now: float) -> None:
        """A node that left a phase gave a waiting leg back: the system places the call again."""
        if call.prefill_node is None or call.decode_node is None:
            return
        other, rest = (call.decode_node, DECODE) if phase is PREFILL else (call.prefill_node, PREFILL)
        call.prefill_node = call.decode_node = None
        self._nodes[other].withdraw(call, rest, now)
        self.agenda.at(now, lambda at: self._do(self.system.arrived(call, at), at))

    def prefill_started(self, call: Call, now: float) -> None:
        self.system.prefill_started(call, now)

    def prefilled(self, call: Call, now: float) -> None:
        """The prompt has KV, the first token is there."""
        if not self.system.traits.token_after_transfer:
            call.first_token_at = now
        self._produce(call.keys[call.cached_tokens // self.block_tokens :])
        self._do(self.system.prefilled(call, now), now)

    def transfer(self, call: Call, now: float) -> None:
        """The decode leg starts when the KV is there; the prefill leg is over then."""
        source, sink = self.node(call.prefill_node), self.node(call.decode_node)

        def here(at: float) -> None:
            if self.system.traits.token_after_transfer:
                call.first_token_at = at
            source.handed_off(call, at)
            sink.engine.decode(call, at)

        self.agenda.at(source.sent(call), here)

    def answered(self, call: Call, now: float) -> None:
        call.ended_at = now
        self.open_calls -= 1
        self._produce(call.output_keys)
        self.watch.answered(call)
        self._do(self.system.ended(call, now), now)
        self.finished(call, now)
        call.keys = call.output_keys = NO_KEYS

    # iterations

    def prefill_iterated(
        self, node: Node, terms: PrefillTerms, cached_tokens: int, duration_s: float, now: float
    ) -> None:
        node.prefixes.computed_at = now
        for listener in self._listeners:
            listener.prefill_iterated(node.name, terms, cached_tokens, duration_s, now)

    def decode_iterated(
        self, node: Node, count: int, requests: int, context_tokens: float, duration_s: float, now: float
    ) -> None:
        for listener in self._listeners:
            listener.decode_iterated(node.name, count, requests, context_tokens, duration_s, now)

    # phases

    def _move(self, moves: list[Move], now: float) -> None:
        if not moves:
            return
        before = self.split
        cost = self.system.traits.switch
        switch = Switch(now, before, "", {move.node for move in moves}, moves[0].reason, moves[0].counts)
        self.switches.append(switch)
        for move in moves:
            node = self._nodes[move.node]
            plain = cost.relaunch_s is None and not cost.capture_s and (cost.keeps_kv or cost.at_once)
            if plain and move.phase is not None and node.phase is not None:
                node.command(move.phase, now)
                if not cost.keeps_kv:
                    node.memory.forget()
                continue
            low, high = cost.relaunch_s or (0.0, 0.0)
            wait_s = 0.0 if move.phase is None else low + (high - low) * self.draw()
            self._relaunching[move.node] = _Relaunch(move.phase, now + wait_s, cost.capture_s, cost.keeps_kv)
            node.leave(now)
        switch.after = self.split

    def drained(self, node: Node, now: float) -> None:
        """Nothing of the old phase runs on the node any more."""
        relaunch = self._relaunching.pop(node.name, None)
        if relaunch is None:
            self._moved(node, now)
            return
        back_at = max(relaunch.until, now + relaunch.capture_s)

        def back(at: float) -> None:
            node.relaunch(relaunch.phase, keeps_kv=relaunch.keeps_kv)
            self._moved(node, at)

        self.agenda.at(back_at, back)

    def _moved(self, node: Node, now: float) -> None:
        node.moving = False
        for switch in self.switches:
            if switch.ended_at is None and node.name in switch.nodes:
                switch.nodes.discard(node.name)
                if not switch.nodes:
                    switch.ended_at, switch.after = now, self.split
                    self.watch.switched(switch)
        self._do(self.system.moved(node.name, now), now)

    def check(self) -> None:
        """Invariants of every node; every open call is somewhere."""
        for node in self._nodes.values():
            node.check()
