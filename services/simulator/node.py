"""One node: the product's queue of legs, an engine in virtual time, its memory and its ports."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from schemas.phase import Phase, PhaseCommand, SwitchState
from schemas.serve import FetchSource, Finish, Handoff, HandoffReply, HandoffVerb, Sampling, ServeRequest
from services.engine.backend import LegKey
from services.engine.core import effects as fx
from services.engine.core.batching import PrefillWork
from services.engine.core.limits import Limits
from services.engine.core.queueing import Queueing
from services.engine.core.timing import PrefillTerms, attention_pairs
from services.simulator.call import Call
from services.simulator.engine import Engine, Prefilling
from services.simulator.links import Port, send_between
from services.simulator.memory import NodeMemory, prompt_and_answer
from services.simulator.system import KvListener, Load, Place, Traits

if TYPE_CHECKING:
    from services.simulator.world import World

_NEVER_S = 1e9
SWEEP_S = 60.0
ROUTER = "router"


class Held:
    """What a prefill leg keeps: pieces in host memory, and pieces and promised blocks on the device once it is in."""

    __slots__ = ("device_blocks", "host", "promised", "sent_at")

    def __init__(self) -> None:
        self.host: int | None = None
        self.device_blocks = 0
        self.promised = 0
        self.sent_at = 0.0


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
        self.given_up_fetches = 0
        block = world.block_tokens
        self.memory = NodeMemory(
            name,
            hardware.l1_tokens // block,
            hardware.l2_tokens // traits.host_copies // block,
            watch,
            lambda: world.agenda.now,
        )
        self.sends, self.receives = Port(hardware.device_link), Port(hardware.device_link)
        self.serves, self.fetches = Port(hardware.host_link), Port(hardware.host_link)
        self.restores = Port(hardware.restore)
        self.engine = Engine(
            world.agenda,
            self,
            hardware.times,
            hardware.accepted_tokens,
            hardware.batch_tokens,
            hardware.max_running,
        )
        self.queue = self._new_queue()
        self._held: dict[str, Held] = {}
        self._plans: dict[str, tuple[FetchSource, ...]] = {}
        self._decode_blocks: dict[str, int] = {}
        self._wake_at = _NEVER_S
        self._sweep_at = 0.0
        self._pumping = False
        self._leaving = False

    def _new_queue(self) -> Queueing:
        hardware, block = self.world.hardware, self.world.block_tokens
        limits = Limits(
            node=self.name,
            block_size=block,
            batch_tokens=hardware.batch_tokens,
            l1_tokens=hardware.l1_tokens,
            max_context_tokens=hardware.l1_tokens,
            max_running=hardware.max_running,
            shared_pair=True,
            max_waiting=1 << 30,
            router_timeout_s=_NEVER_S,
            node_timeout_s=_NEVER_S,
            sweep_s=SWEEP_S,
            order_weight=self.traits.order_weight,
        )
        return Queueing.of(limits, hardware.times, phase=self.phase or Phase.BOTH)

    # what systems see

    @property
    def decoding(self) -> int:
        return self.engine.decoding

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
        return self.memory.leading(call.keys, self._limit(call))

    # legs come

    def take(self, place: Place, phase: Phase, now: float) -> bool:
        """Take one leg of a placed call; False if the queue refuses it."""
        call = place.call
        request = ServeRequest(
            id=call.id,
            attempt=call.attempt,
            phase=phase,
            router=ROUTER,
            peer=place.decode if phase is Phase.PREFILL else place.prefill,
            room=call.attempt,
            prompt_tokens=call.prompt_tokens,
            sampling=Sampling(max_new_tokens=max(1, call.output_tokens)),
            deadline_s=_NEVER_S,
            fetch=list(place.fetch) if phase is Phase.PREFILL else [],
            cached_tokens=place.cached_tokens,
            branch=call.branch,
            version=call.version,
        )
        reply, effects = self.queue.serve(request, now)
        if not reply.accepted:
            return False
        if phase is Phase.PREFILL:
            self.prefill_calls[call.id] = call
            self._held[call.id] = Held()
            call.queued_at = now
        else:
            self.decode_calls[call.id] = call
            self.waiting_decode_kv += call.prompt_tokens
        self._perform(effects, now)
        if phase is Phase.PREFILL:
            self.pump(now)
        return True

    def withdraw(self, call: Call, phase: Phase, now: float) -> None:
        """End a leg of a call that was given back by its other leg or by the system."""
        _, effects = self.queue.cancel(call.id, call.attempt, phase, now)
        self._perform(effects, now)

    def pump(self, now: float) -> None:
        """Let in what may enter."""
        if self._pumping or not (self.queue.table.waiting[Phase.PREFILL] or now >= self._sweep_at):
            return
        self._sweep_at = now + SWEEP_S
        self._pumping = True
        while True:
            effects = self.queue.step(now, self.memory.room() * self.world.block_tokens)
            if not effects:
                break
            self._perform(effects, now)
        self._pumping = False
        due = self.queue.prefill.next_due(now) if self.queue.table.waiting[Phase.PREFILL] else None
        if due is not None and due < self._wake_at:
            self._wake_at = due
            self.world.agenda.at(due, self._wake)

    def _wake(self, now: float) -> None:
        if now >= self._wake_at:
            self._wake_at = _NEVER_S
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
        end = now
        brought: list[tuple[int, int]] = []
        if self.traits.load is Load.WAITING:
            for source in effect.sources:
                if source.node != self.name:
                    last, come = self._bring(call, source.node, source.first, source.last, now)
                    end = max(end, come)
                    if brought and brought[-1][1] == source.first:
                        brought[-1] = brought[-1][0], last
                    else:
                        brought.append((source.first, last))
        else:
            self._plans[call.id] = effect.sources

        def fetched(at: float) -> None:
            if self.queue.table.pins.get(effect.fetch_id) != effect.key:
                return
            call.fetch_s = at - now
            for first, last in brought:
                self.memory.write_host(call.keys, first, last, at)
            self._pin(call, effect, at)
            self.pump(at)

        if end > now:
            self.world.agenda.at(end, fetched)
        else:
            fetched(now)

    def _pin(self, call: Call, effect: fx.Fetch, now: float) -> None:
        _, blocks = self.memory.leading(call.keys, self._limit(call))
        held = self._held[call.id]
        self.memory.l2.unhold(held.host)
        held.host = self.memory.l2.hold(call.keys, blocks, now)
        self._unqueue(call)
        call.cached_tokens = blocks * self.world.block_tokens
        self.queued_uncached += call.uncached_tokens
        call.notes["queued"] = call.uncached_tokens
        self._perform(self.queue.fetched(effect.fetch_id, blocks), now)

    def _bring(self, call: Call, name: str, first: int, last: int, now: float) -> tuple[int, float]:
        """Which of blocks [first, last) a peer's host memory has, as the end of them, and when they have come."""
        peer = self.world.node(name)
        end = peer.memory.l2.reach(call.keys, first, min(last, self._limit(call)))
        if end <= first:
            return first, now
        peer.memory.l2.touch(call.keys, end, now)
        tokens = (end - first) * self.world.block_tokens
        done = send_between(peer.serves, self.fetches, tokens * self.world.hardware.kv_bytes_per_token, now)
        call.fetched_tokens += tokens
        return end, done + self.world.hardware.latency_s

    def _release(self, effect: fx.Release, now: float) -> None:
        """The queue lets go of a pin; `_held` says whose."""
        held = self._held.get(effect.fetch_id.split("/", 1)[0])
        if held is not None:
            self.memory.l2.unhold(held.host)
            held.host = None

    def _give_up(self, effect: fx.FetchGivenUp, now: float) -> None:
        self.given_up_fetches += 1

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
        verb = effect.verb
        message = Handoff(
            verb=verb,
            id=effect.key.id,
            attempt=effect.key.attempt,
            node=self.name,
            room=effect.room,
            token=effect.token,
        )
        reply = self.world.node(effect.peer).hear(message, now)
        if verb is HandoffVerb.DONE:
            self._perform(self.queue.told(effect.key, "" if reply.granted else reply.reason, now), now)

    def _submit(self, effect: fx.Submit, now: float) -> None:
        key = effect.key
        if key.phase is Phase.DECODE:
            call = self.decode_calls[key.id]
            blocks = -(-(call.prompt_tokens + call.output_tokens) // self.world.block_tokens)
            self._decode_blocks[key.id] = blocks
            self.memory.promise(blocks)
            self.decode_kv += call.prompt_tokens
            self.waiting_decode_kv -= call.prompt_tokens
            return
        self._load(self.prefill_calls[key.id], now)

    def _load(self, call: Call, now: float) -> None:
        """Device room for a prefill, and its prefix on the way there."""
        held, memory, block = self._held[call.id], self.memory, self.world.block_tokens
        device, blocks = memory.leading(call.keys, self._limit(call))
        memory.write_device(call.keys, device, blocks, now)
        blocks = memory.l1.reach(call.keys, 0, blocks)
        self._hold_device(call, held, blocks, now)
        held.promised = max(0, -(-(call.prompt_tokens + 1) // block) - blocks)
        memory.promise(held.promised)
        call.cached_tokens = blocks * block
        call.restored_tokens = max(0, blocks - device) * block
        item = Prefilling(call, PrefillWork(call.prompt_tokens, call.cached_tokens, call.restored_tokens))
        if self.traits.load is Load.WAITING and call.restored_tokens:
            size = call.restored_tokens * self.world.hardware.kv_bytes_per_token
            self.world.agenda.at(self.restores.send(size, now), lambda at: self.engine.prefill(item, at))
        else:
            self.engine.prefill(item, now)

    def _hold_device(self, call: Call, held: Held, blocks: int, now: float) -> None:
        """So many leading blocks of the prompt are in use on the device, instead of what was.

        Used last, they are the last to go; the device's whole memory does not turn over while a prefill runs.
        """
        self.memory.held += blocks - held.device_blocks
        held.device_blocks = blocks
        if blocks:
            self.memory.l1.touch(call.keys, blocks, now)

    def _prefilled(self, effect: fx.Prefilled, now: float) -> None:
        """The decode leg may start when the KV is here: the prefill node says when."""
        call = self.decode_calls[effect.key.id]
        self.world.transfer(call, now)

    def _report(self, effect: fx.Report, now: float) -> None:
        if effect.finish is None:
            return
        call = (self.prefill_calls if effect.key.phase is Phase.PREFILL else self.decode_calls).pop(effect.key.id)
        if effect.key.phase is Phase.PREFILL:
            self._unqueue(call)
            self._held.pop(call.id)
            self._plans.pop(call.id, None)
        elif call.id not in self._decode_blocks:
            self.waiting_decode_kv -= call.prompt_tokens
        if effect.finish is Finish.REQUEUED:
            self.world.give_back(call, effect.key.phase, now)

    def _phase_report(self, effect: fx.PhaseReport, now: float) -> None:
        if effect.state is SwitchState.SWITCHED:
            self.world.drained(self, now)

    # the engine's events

    def prefill_begins(self, item: Prefilling, now: float) -> float:
        call, held = item.call, self._held[item.call.id]
        self._unqueue(call)
        call.prefill_started_at = now
        self.world.prefill_started(call, now)
        wait_s = 0.0 if self.traits.load is Load.WAITING else self._load_at_start(item, now)
        sink = self.world.node(call.decode_node)
        if sink is not self and call.cached_tokens:
            size = call.cached_tokens * self.world.hardware.kv_bytes_per_token
            held.sent_at = send_between(self.sends, sink.receives, size, now + wait_s)
        return wait_s

    def _load_at_start(self, item: Prefilling, now: float) -> float:
        """Bring the prefix now: the device waits for what peers have, and layer by layer for the rest.

        Loading from the own host memory goes on beside the computation; only what takes longer than that is waited for.
        """
        call, hardware = item.call, self.world.hardware
        come = self._bring_at_start(item, now)
        loaded = (
            self.restores.send(call.restored_tokens * hardware.kv_bytes_per_token, come)
            if call.restored_tokens
            else come
        )
        work = item.work
        pairs = attention_pairs(work.left, work.done)
        computing = self.engine.times.prefill_s(PrefillTerms(1, work.left, pairs, work.restored_tokens))
        call.fetch_exposed_s = (come - now) + max(0.0, loaded - come - computing)
        return call.fetch_exposed_s

    def _bring_at_start(self, item: Prefilling, now: float) -> float:
        """Fetch what the plan names from peers; the item's work shrinks by what has come."""
        call, block = item.call, self.world.block_tokens
        end = now
        first = call.cached_tokens // block
        for source in self._plans.pop(call.id, ()):
            start, last = max(first, source.first), min(source.last, self._limit(call))
            if source.node != self.name and start < last:
                last, come = self._bring(call, source.node, start, last, now)
                end = max(end, come)
                self.memory.write_host(call.keys, start, last, now)
        if end > now:
            call.fetch_s = end - now
            _, blocks = self.memory.leading(call.keys, self._limit(call))
            more = max(0, blocks * block - call.cached_tokens)
            call.cached_tokens += more
            call.restored_tokens += more
            item.work.done, item.work.restored_tokens = call.cached_tokens, call.restored_tokens
        return end

    def prefill_done(self, item: Prefilling, now: float) -> None:
        call, held, memory = item.call, self._held[item.call.id], self.memory
        call.prefilled_at = now
        full = len(call.keys)
        first = call.cached_tokens // self.world.block_tokens
        memory.promised -= held.promised
        held.promised = 0
        memory.write_device(call.keys, first, full, now)
        memory.write_host(call.keys, first, full, now)
        sink = self.world.node(call.decode_node)
        if sink is not self:
            size = item.last_tokens * self.world.hardware.kv_bytes_per_token
            sent = send_between(self.sends, sink.receives, size, now)
            held.sent_at = max(sent, held.sent_at) + self.world.hardware.latency_s
        else:
            held.sent_at = now
        self.world.prefilled(call, now)
        self._perform(self.queue.first_token(self._key(call, Phase.PREFILL), 0), now)

    def sent(self, call: Call) -> float:
        """When the KV of a call whose prefill has ended here is on its decode node."""
        return self._held[call.id].sent_at

    def handed_off(self, call: Call, now: float) -> None:
        """The KV of a call has left: its blocks here are a cache from now on."""
        held = self._held[call.id]
        self._hold_device(call, held, 0, now)
        self._left(call, Phase.PREFILL, Finish.HANDED_OFF, now)

    def decode_done(self, call: Call, now: float) -> None:
        self.memory.promised -= self._decode_blocks[call.id]
        self.decode_kv -= call.prompt_tokens
        if self.traits.writes_output:
            self.memory.write_host(prompt_and_answer(call), len(call.keys), len(call.keys) + len(call.output_keys), now)
        self._left(call, Phase.DECODE, Finish.LENGTH, now)
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

    def invite(self, call: Call, now: float) -> None:
        """Bring a running decode here from its node, if there is room."""
        source = self.world.node(call.decode_node)
        blocks = source.decode_blocks(call)
        if blocks is None or blocks > self.memory.room() or source is self:
            return
        self.memory.promise(blocks)
        size = call.prompt_tokens * self.world.hardware.kv_bytes_per_token
        self.world.agenda.at(
            send_between(source.sends, self.receives, size, now), lambda at: self._take_over(call, source, blocks, at)
        )

    def _take_over(self, call: Call, source: Node, blocks: int, now: float) -> None:
        if call.ended_at is not None or call.decode_node != source.name:
            self.memory.promised -= blocks
            return

        def over(left: int, at: float) -> None:
            source.let_go(call, at)
            call.decode_node = self.name
            self.decode_calls[call.id] = call
            self._decode_blocks[call.id] = blocks
            self.decode_kv += call.prompt_tokens
            self.engine.resume(call, left, at)

        source.engine.leave(call, over, now)

    def decode_blocks(self, call: Call) -> int | None:
        """Device blocks that a call in decode has here; None if it is not."""
        return self._decode_blocks.get(call.id)

    def let_go(self, call: Call, now: float) -> None:
        """A running decode goes on elsewhere."""
        self.memory.promised -= self._decode_blocks[call.id]
        self.decode_kv -= call.prompt_tokens
        self._left(call, Phase.DECODE, Finish.HANDED_OFF, now)
        del self._decode_blocks[call.id]

    def _key(self, call: Call, phase: Phase) -> LegKey:
        return LegKey(call.id, call.attempt, phase)

    def _limit(self, call: Call) -> int:
        """Blocks of the prompt that can be reused: its last token is always computed."""
        return (call.prompt_tokens - 1) // self.world.block_tokens

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
    fx.FetchGivenUp: Node._give_up,
    fx.Ask: Node._ask,
    fx.Tell: Node._tell,
    fx.Submit: Node._submit,
    fx.Prefilled: Node._prefilled,
    fx.Report: Node._report,
    fx.PhaseReport: Node._phase_report,
}
