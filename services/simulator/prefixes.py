"""How a node comes by the prefixes of its prefills: fetched from peers, pinned in host memory, loaded on the device."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from schemas.serve import FetchSource
from services.engine.core.batching import PrefillWork
from services.engine.core.timing import PrefillTerms, PrefillTime, attention_pairs
from services.simulator.call import Call
from services.simulator.engine import Prefilling
from services.simulator.links import Port, send_between
from services.simulator.memory import NodeMemory
from services.simulator.system import Load

if TYPE_CHECKING:
    from services.simulator.world import World


class Held:
    """What one prefill leg has: a pin in host memory, what peers are bringing, and its share of the device.

    `brought`: ranges of blocks on their way; `plan`: sources to fetch from when its prefill starts. `since`,
    `restored_since`: when it began to come from peers, and to the device.
    """

    __slots__ = ("brought", "device_blocks", "pin", "plan", "promised", "restored_since", "since")

    def __init__(self) -> None:
        self.pin: int | None = None
        self.brought: list[tuple[int, int]] = []
        self.plan: Sequence[FetchSource] = ()
        self.since = self.restored_since = 0.0
        self.device_blocks = 0
        self.promised = 0


class Prefixes:
    """`serves`, `fetches`: ports of host memory to peers; `restores`: from host memory to the device.

    `computed_at`: when the device last had a prefill to compute.
    """

    def __init__(self, name: str, world: World, memory: NodeMemory, load: Load) -> None:
        hardware = world.hardware
        self.name, self.memory = name, memory
        self.serves, self.fetches = Port(hardware.host_link), Port(hardware.host_link)
        self.restores = Port(hardware.restore)
        self.computed_at = 0.0
        self._world, self._load = world, load
        self._held: dict[str, Held] = {}
        self._ahead: dict[str, tuple[int, int, float]] = {}

    def begin(self, call: Call) -> None:
        """A prefill leg has come."""
        self._held[call.id] = Held()

    def end(self, call: Call) -> None:
        """The leg is over; what it pinned has been released."""
        held = self._held.pop(call.id)
        assert held.pin is None
        assert not held.device_blocks
        self.memory.promised -= held.promised

    def leading(self, call: Call) -> tuple[int, int]:
        """Leading reusable blocks of its prompt: on the device, and here at all."""
        return self.memory.leading(call.keys, self._limit(call))

    def _limit(self, call: Call) -> int:
        """Blocks of the prompt that can be reused: its last token is always computed."""
        return (call.prompt_tokens - 1) // self._world.block_tokens

    # while it waits

    def fetch(self, call: Call, sources: Sequence[FetchSource], now: float) -> float:
        """Begin to bring what peers are to supply; when it will have come. Loading at start only remembers the plan."""
        held = self._held[call.id]
        held.since, held.brought = now, []
        if self._load is Load.AT_START:
            held.plan = sources
            return now
        end = now
        for source in sources:
            if source.node != self.name:
                last, come = self._bring(call, source, now)
                end = max(end, come)
                if held.brought and held.brought[-1][1] == source.first:
                    held.brought[-1] = held.brought[-1][0], last
                else:
                    held.brought.append((source.first, last))
        return end

    def arrived(self, call: Call, now: float) -> int:
        """What peers sent is here: pin the leading blocks; how many those are."""
        held = self._held[call.id]
        call.fetch_s = now - held.since
        for first, last in held.brought:
            self.memory.write_host(call.keys, first, last, now)
        _, blocks = self.leading(call)
        self.memory.l2.unhold(held.pin)
        held.pin = self.memory.l2.hold(call.keys, blocks, now)
        call.cached_tokens = blocks * self._world.block_tokens
        return blocks

    def unpin(self, call_id: str) -> None:
        """Let go of what is pinned in host memory."""
        held = self._held.get(call_id)
        if held is not None:
            self.memory.l2.unhold(held.pin)
            held.pin = None

    def _bring(self, call: Call, source: FetchSource, now: float) -> tuple[int, float]:
        """How far a peer's host memory has what it is to supply, and when that will have come."""
        peer = self._world.node(source.node).prefixes
        host, first = peer.memory.l2, source.first
        end = host.reach(call.keys, first, min(source.last, self._limit(call)))
        if end <= first:
            return first, now
        host.touch(call.keys, end, now)
        tokens = (end - first) * self._world.block_tokens
        done = send_between(peer.serves, self.fetches, tokens * self._world.hardware.kv_bytes_per_token, now)
        call.fetched_tokens += tokens
        return end, done + self._world.hardware.latency_s

    # on the device

    def load(self, call: Call, now: float) -> tuple[Prefilling, float]:
        """Device room for a prefill that was let in; the work of it, and when its prefix is there to begin."""
        held, memory, block = self._held[call.id], self.memory, self._world.block_tokens
        device, blocks = self.leading(call)
        memory.write_device(call.keys, device, blocks, now)
        blocks = memory.l1.reach(call.keys, 0, blocks)
        self._use_device(call, held, blocks, now)
        held.promised = max(0, -(-(call.prompt_tokens + 1) // block) - blocks)
        memory.promise(held.promised)
        call.cached_tokens = blocks * block
        call.restored_tokens = max(0, blocks - device) * block
        item = Prefilling(call, PrefillWork(call.prompt_tokens, call.cached_tokens, call.restored_tokens, call.media))
        come = self._came_ahead(call, min(device, blocks), now)
        if self._load is Load.WAITING and call.restored_tokens:
            come = self.restores.send(call.restored_tokens * self._world.hardware.kv_bytes_per_token, now)
        held.restored_since, call.restore_s = now, come - now
        return item, come

    def preload(self, branch: str, keys: array[int], running: Iterable[Call], now: float) -> int:
        """Begin to bring what host memory here has of a branch's context to the device, ahead of its next request.

        It takes the place of what was used least recently and by none of `running`; nothing happens where that is too
        little. Returns its tokens.
        """
        memory, world = self.memory, self._world
        device, blocks = memory.leading(keys, len(keys))
        if blocks <= device or blocks - device > memory.room():
            return 0
        for call in running:
            held = self._held[call.id]
            if held.device_blocks:
                memory.l1.touch(call.keys, held.device_blocks, now)
        memory.write_device(keys, device, blocks, now)
        blocks = memory.l1.reach(keys, 0, blocks)
        tokens = max(0, blocks - device) * world.block_tokens
        self._ahead[branch] = device, blocks, self.restores.send(tokens * world.hardware.kv_bytes_per_token, now)
        return tokens

    def _came_ahead(self, call: Call, device: int, now: float) -> float:
        """When what was brought ahead for a call is there; it counts what of that its prompt finds on the device."""
        first, last, come = self._ahead.pop(call.branch, (0, 0, now))
        call.preloaded_tokens = max(0, min(device, last) - first) * self._world.block_tokens
        return max(now, come) if call.preloaded_tokens else now

    def load_at_start(self, item: Prefilling, times: PrefillTime, now: float) -> float:
        """Seconds that the device waits for a prefix that is loaded when its prefill starts, 0 where it is there.

        What peers have is waited for; loading from the own host memory goes on layer by layer beside the computation,
        so only what takes longer than that is.
        """
        if self._load is not Load.AT_START:
            item.call.fetch_exposed_s = self._exposed_s(item.call, now)
            return 0.0
        call, work = item.call, item.work
        come = self._bring_at_start(item, now)
        size = call.restored_tokens * self._world.hardware.kv_bytes_per_token
        loaded = self.restores.send(size, come) if size else come
        call.restore_s = loaded - come
        pairs = attention_pairs(work.left, work.done)
        computing = times.prefill_s(PrefillTerms(1, work.left, pairs, work.restored_tokens))
        call.fetch_exposed_s = (come - now) + max(0.0, loaded - come - computing)
        return call.fetch_exposed_s

    def _exposed_s(self, call: Call, now: float) -> float:
        """Seconds of loading in which the device had no prefill to compute, just before the one that starts now."""
        held = self._held[call.id]
        loads = ((held.since, call.fetch_s), (held.restored_since, call.restore_s))
        return sum(max(0.0, min(since + took_s, now) - max(since, self.computed_at)) for since, took_s in loads)

    def _bring_at_start(self, item: Prefilling, now: float) -> float:
        """Fetch what the plan names from peers; the item's work shrinks by what has come."""
        call, held, block = item.call, self._held[item.call.id], self._world.block_tokens
        end, first = now, call.cached_tokens // block
        for source in held.plan:
            start = max(first, source.first)
            if source.node != self.name and start < source.last:
                last, come = self._bring(call, FetchSource(node=source.node, first=start, last=source.last), now)
                end = max(end, come)
                self.memory.write_host(call.keys, start, last, now)
        held.plan = ()
        if end > now:
            call.fetch_s = end - now
            _, blocks = self.leading(call)
            more = max(0, blocks * block - call.cached_tokens)
            call.cached_tokens += more
            call.restored_tokens += more
            item.work.done, item.work.restored_tokens = call.cached_tokens, call.restored_tokens
        return end

    def computed(self, call: Call, now: float) -> None:
        """The whole prompt has KV on the device; it is written through to host memory."""
        held, full = self._held[call.id], len(call.keys)
        first = call.cached_tokens // self._world.block_tokens
        self.memory.promised -= held.promised
        held.promised = 0
        self.memory.write_device(call.keys, first, full, now)
        self.memory.write_host(call.keys, first, full, now)

    def let_go(self, call: Call) -> None:
        """The KV has left for its decode node: what lies here is a cache from now on."""
        self._use_device(call, self._held[call.id], 0, 0.0)

    def _use_device(self, call: Call, held: Held, blocks: int, now: float) -> None:
        """So many leading blocks of the prompt are in use on the device, instead of what was.

        Used last, they are the last to go; the device's whole memory does not turn over while a prefill runs.
        """
        self.memory.held += blocks - held.device_blocks
        held.device_blocks = blocks
        if blocks:
            self.memory.l1.touch(call.keys, blocks, now)
