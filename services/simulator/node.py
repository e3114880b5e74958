"""One node: the product's queue of legs, an engine in virtual time, its memory and its ports."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from schemas.phase import Phase, PhaseCommand, SwitchState
from schemas.serve import Finish, Handoff, HandoffReply, HandoffVerb, Sampling, ServeRequest
from services.engine.backend import LegKey
from services.engine.core import effects as fx
from services.engine.core.queueing import Queueing
from services.engine.core.timing import PrefillTerms
from services.simulator.call import Call
from services.simulator.engine import Engine, Prefilling
from services.simulator.links import Port, send_between
from services.simulator.memory import NodeMemory, prompt_and_answer
from services.simulator.prefixes import Prefixes
from services.simulator.queues import NEVER_S, SWEEP_S, queue_of
from services.simulator.system import KvListener, Place, Traits

if TYPE_CHECKING:
    from services.simulator.world import World

ROUTER = "router"
PREFILL, DECODE = Phase.PREFILL, Phase.DECODE


class Node:
    """A `NodeView` of `services.simulator.system`; `world` carries out what concerns others."""

    def __init__(self, name: str, phase: Phase | None, world: World, traits: Traits, watch: KvListener | None) -> None:
        hardware = world.hardware
        self.name, self.phase, self.world, self.traits = name, phase, world, traits
        self.epoch = 0
        self.moving = False
        self.prefill_calls: dict[str, Call] = {}
        self.decode_calls: dict[str, Call] = {}
        self.queued_uncached = 0
        self.decode_kv = 0
        self.waiting_decode_kv = 0
        block = world.block_tokens
        self.memory = NodeMemory(
            name,
            hardware.l1_tokens // block,
            hardware.l2_tokens // traits.host_copies // block,
            watch,
            lambda: world.agenda.now,
        )
        self.sends, self.receives = Port(hardware.device_link), Port(hardware.device_link)
        self.prefixes = Prefixes(name, world, self.memory, traits.load)
        self.engine = Engine(
            world.agenda,
            self,
            hardware.times,
            hardware.accepted_tokens,
            hardware.batch_tokens,
            hardware.max_running,
        )
        self.queue = self._new_queue()
        self._sent_at: dict[str, float] = {}
        self._decode_blocks: dict[str, int] = {}
        self._wake_at = NEVER_S
        self._sweep_at = 0.0
        self._pumping = False
        self._leaving = False

    def _new_queue(self) -> Queueing:
        return queue_of(self.name, self.phase, self.world.hardware, self.world.block_tokens, self.traits)

    # what systems see

    @property
    def decoding(self) -> int:
        return self.engine.decoding

    def decoding_by_length(self, now: float) -> list[int]:
        return self.engine.decoding_by_length(now)

    @property
    def l1_tokens(self) -> int:
        return self.memory.l1.capacity_blocks * self.world.block_tokens

    @property
    def l2_tokens(self) -> int:
        return self.memory.l2.capacity_blocks * self.world.block_tokens

    @property
    def l2_used_tokens(self) -> int:
        return self.memory.l2.used_blocks * self.world.block_tokens

    @property
    def l2_referenced_tokens(self) -> int:
        return self.memory.l2.referenced_blocks * self.world.block_tokens

    def cached_blocks(self, call: Call) -> tuple[int, int]:
        return self.prefixes.leading(call)

    # legs come

    def take(self, place: Place, phase: Phase, now: float) -> bool:
        """Take one leg of a placed call; False if the queue refuses it."""
        call = place.call
        request = ServeRequest(
            id=call.id,
            attempt=call.attempt,
            phase=phase,
            router=ROUTER,
            peer=place.decode if phase is PREFILL else place.prefill,
            room=call.attempt,
            prompt_tokens=call.prompt_tokens,
            sampling=Sampling(max_new_tokens=max(1, call.output_tokens)),
            deadline_s=NEVER_S,
            fetch=list(place.fetch) if phase is PREFILL else [],
            cached_tokens=place.cached_tokens,
            branch=call.branch,
            version=call.version,
        )
        reply, effects = self.queue.serve(request, now)
        if not reply.accepted:
            return False
        if phase is PREFILL:
            self.prefill_calls[call.id] = call
            self.prefixes.begin(call)
            call.queued_at = now
        else:
            self.decode_calls[call.id] = call
            self.waiting_decode_kv += call.prompt_tokens
        self._perform(effects, now)
        if phase is PREFILL:
            self.pump(now)
        return True

    def withdraw(self, call: Call, phase: Phase, now: float) -> None:
        """End a leg of a call that was given back by its other leg or by the system."""
        _, effects = self.queue.cancel(call.id, call.attempt, phase, now)
        self._perform(effects, now)

    def pump(self, now: float) -> None:
        """Let in what may enter."""
        if self._pumping or not (self.queue.table.waiting[PREFILL] or now >= self._sweep_at):
            return
        self._sweep_at = now + SWEEP_S
        self._pumping = True
        while True:
            effects = self.queue.step(now, self.memory.room() * self.world.block_tokens)
            if not effects:
                break
            self._perform(effects, now)
        self._pumping = False
        due = self.queue.prefill.next_due(now) if self.queue.table.waiting[PREFILL] else None
        if due is not None and due < self._wake_at:
            self._wake_at = due
            self.world.agenda.at(due, self._wake)

    def _wake(self, now: float) -> None:
        if now >= self._wake_at:
            self._wake_at = NEVER_S
            self.pump(now)

    # the queue's effects

    def _perform(self, effects: list[fx.Effect], now: float) -> None:
        for effect in effects:
            perform = _PERFORM.get(type(effect))
            if perform is not None:
                perform(self, effect, now)

    def _read_prompt(self, effect: fx.ReadPrompt, now: float) -> None:
        self._perform(self.queue.prompt_read(effect.key), now)

    def _fetch(self, effect: fx.Fetch, now: float) -> None:
        """Bring what peers are to supply; then pin what is here."""
        call = self.prefill_calls[effect.key.id]

        def fetched(at: float) -> None:
            if self.queue.table.pins.get(effect.fetch_id) == effect.key:
                blocks = self.prefixes.arrived(call, at)
                self._unqueue(call)
                self.queued_uncached += call.uncached_tokens
                call.notes["queued"] = call.uncached_tokens
                self._perform(self.queue.fetched(effect.fetch_id, blocks), at)
                self.pump(at)

        come = self.prefixes.fetch(call, effect.sources, now)
        if come > now:
            self.world.agenda.at(come, fetched)
        else:
            fetched(now)

    def _release(self, effect: fx.Release, now: float) -> None:
        self.prefixes.unpin(effect.fetch_id.split("/", 1)[0])

    def _ask(self, effect: fx.Ask, now: float) -> None:
        message = Handoff(
            verb=HandoffVerb.RESERVE, id=effect.key.id, attempt=effect.key.attempt, node=self.name, room=effect.room
        )
        reply = self.world.node(effect.peer).hear(message, now)
        self._perform(self.queue.answered(effect.number, reply, now), now)

    def hear(self, message: Handoff, now: float) -> HandoffReply:
        """What another node says about a call whose prefill it runs."""
        room = self.memory.room() * self.world.block_tokens
        reply, effects = self.queue.handoff(message, now, room)
        self._perform(effects, now)
        return reply

    def _tell(self, effect: fx.Tell, now: float) -> None:
        verb, key = effect.verb, effect.key
        message = Handoff(
            verb=verb, id=key.id, attempt=key.attempt, node=self.name, room=effect.room, token=effect.token
        )
        reply = self.world.node(effect.peer).hear(message, now)
        if verb is HandoffVerb.DONE:
            self._perform(self.queue.told(key, "" if reply.granted else reply.reason, now), now)

    def _submit(self, effect: fx.Submit, now: float) -> None:
        key = effect.key
        if key.phase is DECODE:
            call = self.decode_calls[key.id]
            blocks = -(-(call.prompt_tokens + call.output_tokens) // self.world.block_tokens)
            self._decode_blocks[key.id] = blocks
            self.memory.promise(blocks)
            self.decode_kv += call.prompt_tokens
            self.waiting_decode_kv -= call.prompt_tokens
            return
        item, come = self.prefixes.load(self.prefill_calls[key.id], now)
        if come > now:
            self.world.agenda.at(come, lambda at: self.engine.prefill(item, at))
        else:
            self.engine.prefill(item, now)

    def _prefilled(self, effect: fx.Prefilled, now: float) -> None:
        """The decode leg may start when the KV is here: the prefill node says when."""
        call = self.decode_calls[effect.key.id]
        self.world.transfer(call, now)

    def _report(self, effect: fx.Report, now: float) -> None:
        if effect.finish is None:
            return
        call = (self.prefill_calls if effect.key.phase is PREFILL else self.decode_calls).pop(effect.key.id)
        if effect.key.phase is PREFILL:
            self._unqueue(call)
            self.prefixes.end(call)
        elif call.id not in self._decode_blocks:
            self.waiting_decode_kv -= call.prompt_tokens
        if effect.finish is Finish.REQUEUED:
            self.world.give_back(call, effect.key.phase, now)

    def _phase_report(self, effect: fx.PhaseReport, now: float) -> None:
        if effect.state is SwitchState.SWITCHED:
            self.world.drained(self, now)

    # the engine's events

    def prefill_begins(self, item: Prefilling, now: float) -> float:
        call = item.call
        self._unqueue(call)
        call.prefill_started_at = now
        self.world.prefill_started(call, now)
        wait_s = self.prefixes.load_at_start(item, self.engine.times, now)
        if call.cached_tokens:
            self._sent_at[call.id] = self._send(call, call.cached_tokens, now + wait_s)
        return wait_s

    def prefill_done(self, item: Prefilling, now: float) -> None:
        call = item.call
        call.prefilled_at = now
        self.prefixes.computed(call, now)
        sent = self._send(call, item.last_tokens, now)
        self._sent_at[call.id] = max(sent, self._sent_at.get(call.id, now)) + self.world.hardware.latency_s
        self.world.prefilled(call, now)
        self._perform(self.queue.first_token(self._key(call, PREFILL), 0), now)

    def _send(self, call: Call, tokens: int, now: float) -> float:
        """When the KV of so many tokens has come to its decode node; at once where that is here."""
        sink = self.world.node(call.decode_node)
        if sink is self:
            return now
        return send_between(self.sends, sink.receives, tokens * self.world.hardware.kv_bytes_per_token, now)

    def sent(self, call: Call) -> float:
        """When the KV of a call whose prefill has ended here is on its decode node."""
        return self._sent_at[call.id]

    def handed_off(self, call: Call, now: float) -> None:
        """The KV of a call has left: its blocks here are a cache from now on."""
        del self._sent_at[call.id]
        self.prefixes.let_go(call)
        self._left(call, PREFILL, Finish.HANDED_OFF, now)

    def decode_done(self, call: Call, now: float) -> None:
        self.memory.promised -= self._decode_blocks[call.id]
        self.decode_kv -= call.prompt_tokens
        if self.traits.writes_output:
            self.memory.write_host(prompt_and_answer(call), len(call.keys), len(call.keys) + len(call.output_keys), now)
        self._left(call, DECODE, Finish.LENGTH, now)
        del self._decode_blocks[call.id]
        self.world.answered(call, now)

    def prefill_iterated(self, terms: PrefillTerms, cached_tokens: int, duration_s: float, now: float) -> None:
        self.world.prefill_iterated(self, terms, cached_tokens, duration_s, now)

    def decode_iterated(
        self, iterations: int, requests: int, context_tokens: float, duration_s: float, now: float
    ) -> None:
        self.world.decode_iterated(self, iterations, requests, context_tokens, duration_s, now)

    def _left(self, call: Call, phase: Phase, finish: Finish, now: float) -> None:
        key = self._key(call, phase)
        cached, restored = call.cached_tokens, call.restored_tokens
        if key in self.queue.table.inside[phase]:
            self._perform(self.queue.left(key, finish, "", cached, restored, now), now)
        else:
            self.decode_calls.pop(call.id, None)
        self.pump(now)
        self._look_idle(now)

    # phases

    def command(self, phase: Phase, now: float) -> None:
        """Waiting legs of the phase left behind come back, running ones end here; `world.drained` follows."""
        self.epoch += 1
        self.phase, self.moving = phase, True
        message = PhaseCommand(
            id=f"{self.name}-{self.epoch}",
            t=now,
            node=self.name,
            phase=phase,
            epoch=self.epoch,
            reason="",
            decision_id="",
        )
        self._perform(self.queue.command(message, now), now)
        self.pump(now)

    def leave(self, now: float) -> None:
        """Out of service once what runs has ended; `world.drained` follows."""
        self.phase, self.moving, self._leaving = None, True, True
        self._perform(self.queue.drain(now), now)
        self._look_idle(now)

    def _look_idle(self, now: float) -> None:
        if self._leaving and self.queue.idle() and not self.decode_calls:
            self._leaving = False
            self.world.drained(self, now)

    def relaunch(self, phase: Phase | None, *, keeps_kv: bool) -> None:
        """In service again, as a fresh process."""
        self.phase = phase
        self.queue = self._new_queue()
        if not keeps_kv:
            self.memory.clear()

    def take_over(self, call: Call, blocks: int, left: int, now: float) -> None:
        """A running decode goes on here, in device blocks that were promised for it."""
        call.decode_node = self.name
        self.decode_calls[call.id] = call
        self._decode_blocks[call.id] = blocks
        self.decode_kv += call.prompt_tokens
        self.engine.resume(call, left, now)

    def decode_blocks(self, call: Call) -> int | None:
        """Device blocks that a call in decode has here; None if it is not."""
        return self._decode_blocks.get(call.id)

    def let_go(self, call: Call, now: float) -> None:
        """A running decode goes on elsewhere."""
        self.memory.promised -= self._decode_blocks[call.id]
        self.decode_kv -= call.prompt_tokens
        self._left(call, DECODE, Finish.HANDED_OFF, now)
        del self._decode_blocks[call.id]

    def _key(self, call: Call, phase: Phase) -> LegKey:
        return LegKey(call.id, call.attempt, phase)

    def _unqueue(self, call: Call) -> None:
        queued = call.notes.pop("queued", 0)
        assert isinstance(queued, int)
        self.queued_uncached -= queued

    def check(self) -> None:
        self.queue.check()
        self.engine.check()
        self.memory.check()


_PERFORM: dict[type, Callable[[Node, Any, float], None]] = {
    fx.ReadPrompt: Node._read_prompt,
    fx.Fetch: Node._fetch,
    fx.Release: Node._release,
    fx.Ask: Node._ask,
    fx.Tell: Node._tell,
    fx.Submit: Node._submit,
    fx.Prefilled: Node._prefilled,
    fx.Report: Node._report,
    fx.PhaseReport: Node._phase_report,
}
