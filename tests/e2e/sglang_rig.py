"""Nodes of real SGLang engines on CPU, each with a real pool, without broker and service: what the tests drive."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from schemas.block_key import block_digests, namespace_seed, token_bytes
from schemas.kv import ChangeType, LocationChange
from schemas.phase import Phase
from schemas.pool import AttachRequest, FetchRequest, PoolSource
from schemas.serve import Finish, RequestState, Sampling
from schemas.telemetry import Iteration
from services.app import serve
from services.arena import ArenaReader
from services.bus import MemoryBus, MemoryHub
from services.engine.backend import Leg, LegKey
from services.engine.sglang.backend import SglangBackend
from services.engine.sglang.config import SglangSettings
from services.engine.sglang.model import kv_block_bytes, prepare
from services.kvpool.service import KvPool
from services.kvpool.settings import KvPoolSettings
from services.local_call import FETCH, LocalClient

SETTINGS = SglangSettings(context_tokens=2048, l1_tokens=4096, max_running=4)
END_S = 180.0
"""Longer than any leg takes on a loaded machine; a leg that is lost fails the test by name."""


@dataclass(frozen=True)
class End:
    finish: Finish
    reason: str
    cached_tokens: int
    restored_tokens: int


class Recorder:
    """Keeps every event of one engine, and checks their order."""

    def __init__(self) -> None:
        self.states: dict[LegKey, list[RequestState]] = {}
        self.answers: dict[LegKey, list[int]] = {}
        self.ends: dict[LegKey, asyncio.Future[End]] = {}
        self.reached: dict[tuple[LegKey, RequestState], asyncio.Event] = {}
        self.iterations: list[Iteration] = []
        self.device: set[int] = set()
        self.stored = 0
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def end(self, key: LegKey) -> "asyncio.Future[End]":
        return self.ends.setdefault(key, asyncio.get_running_loop().create_future())

    def reaches(self, key: LegKey, state: RequestState) -> asyncio.Event:
        return self.reached.setdefault((key, state), asyncio.Event())

    def state(self, key: LegKey, state: RequestState) -> None:
        assert not self.end(key).done(), f"{key} is {state} after its end"
        self.states.setdefault(key, []).append(state)
        self.reaches(key, state).set()

    def tokens(self, key: LegKey, first_index: int, tokens: list[int]) -> None:
        assert not self.end(key).done(), f"{key} has tokens after its end"
        answer = self.answers.setdefault(key, [])
        assert first_index == len(answer), f"{key}: token {first_index} after {len(answer)}"
        answer += tokens

    def ended(self, key: LegKey, finish: Finish, reason: str, cached_tokens: int, restored_tokens: int) -> None:
        self.end(key).set_result(End(finish, reason, cached_tokens, restored_tokens))

    def iteration(self, iteration: Iteration) -> None:
        self.iterations.append(iteration)

    def device_changes(self, changes: list[LocationChange]) -> None:
        for change in changes:
            keys = {int.from_bytes(change.hashes[i : i + 8], "little") for i in range(0, len(change.hashes), 8)}
            if change.type is ChangeType.STORED:
                assert not keys & self.device, "a block is stored twice"
                assert change.parent is None or change.parent in self.device, "a block without its parent"
                self.device |= keys
                self.stored += len(keys)
            elif change.type is ChangeType.REMOVED:
                assert keys <= self.device, "a block is removed that was not there"
                self.device -= keys
            else:
                self.device.clear()

    def failed(self, reason: str) -> None:
        self.failure.set_result(reason)


@dataclass
class Node:
    """An engine and its pool."""

    name: str
    backend: SglangBackend
    pool: KvPoolSettings
    events: Recorder
    stop_pool: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: list["asyncio.Task[None]"] = field(default_factory=list)

    async def locate(self, digests: Sequence[bytes]) -> list[bool]:
        """Which of these blocks lie in the node's arena."""
        reader = ArenaReader(self.pool.arena_path)
        return [reader.find(digest) is not None for digest in digests]

    async def stop(self) -> None:
        await self.backend.stop()
        self.stop_pool.set()
        await asyncio.gather(*self.tasks)

    async def settled(self) -> None:
        """Wait until the engine is idle and its writes are done: what it holds is what it told."""
        while True:
            before = (self.backend.used_tokens(), self.events.stored)
            await asyncio.sleep(1.5)
            if before == (self.backend.used_tokens(), self.events.stored):
                return

    def assert_nothing_leaked(self) -> None:
        """Every used page is a block of the tree. (SGLang's own check on idle turns ends the engine otherwise.)"""
        assert not self.events.failure.done(), self.events.failure.result()
        assert self.backend.used_tokens() == len(self.events.device) * SETTINGS.block_size
        assert self.backend.room(Phase.DECODE) == self.backend.info.l1_tokens - SETTINGS.block_size


def leftovers(folder: Path) -> list[Path]:
    """Folders of engines that were not removed."""
    return list(folder.glob("ei-sglang-*"))


async def start_nodes(folder: Path, names: Sequence[str], settings: SglangSettings = SETTINGS) -> list[Node]:
    """Start pools, then engines, all at once."""
    hub, nodes = MemoryHub(), []
    block_bytes = kv_block_bytes(prepare(), settings.block_size, settings.dtype)
    for name in names:
        pool = KvPoolSettings(
            node=name,
            model=settings.model,
            block_size=settings.block_size,
            block_bytes=block_bytes,
            capacity_blocks=400,
            arena=str(folder / f"{name}.arena"),
            socket=str(folder / f"{name}.sock"),
            keep_arena=False,
            transport="shm",
            log_level="error",
            debug_checks=True,
        )
        node = Node(name, SglangBackend(settings, pool_socket=pool.socket_path, folder=folder), pool, Recorder())
        up = asyncio.Event()
        task = asyncio.create_task(
            serve(KvPool, pool, stop=node.stop_pool, bus=MemoryBus(hub), started=lambda _app, up=up: up.set())
        )
        node.tasks.append(task)
        await asyncio.wait_for(up.wait(), 10)
        nodes.append(node)
    await asyncio.gather(*(node.backend.start(node.events) for node in nodes))
    return nodes


def greedy(tokens: int) -> Sampling:
    """Exactly so many tokens, always the most likely one."""
    return Sampling(max_new_tokens=tokens, temperature=0, ignore_eos=True)


def prompt(seed: int, tokens: int) -> list[int]:
    """Token ids that mean nothing, the same for the same seed."""
    source = random.Random(seed)
    return [source.randrange(100, 40_000) for _ in range(tokens)]


def digests(tokens: Sequence[int], salt: str | None = None) -> list[bytes]:
    """The digests of all full blocks of a context."""
    return block_digests(token_bytes(tokens), SETTINGS.block_size, namespace_seed(None, salt))


@dataclass(frozen=True)
class Pair:
    """The two legs of one attempt on two nodes (or on one)."""

    prefill: Node
    decode: Node
    key: tuple[LegKey, LegKey]
    legs: tuple[Leg, Leg]

    def submit(self) -> None:
        self.submit_prefill()
        self.submit_decode()

    def submit_prefill(self) -> None:
        self.prefill.backend.submit(self.legs[0])

    def submit_decode(self) -> None:
        self.decode.backend.submit(self.legs[1])

    async def prefill_end(self) -> End:
        return await asyncio.wait_for(asyncio.shield(self.prefill.events.end(self.key[0])), END_S)

    async def decode_end(self) -> End:
        return await asyncio.wait_for(asyncio.shield(self.decode.events.end(self.key[1])), END_S)

    @property
    def answer(self) -> list[int]:
        return self.decode.events.answers.get(self.key[1], [])


_ROOMS = random.Random(7)


def pair(
    name: str, prefill: Node, decode: Node, tokens: Sequence[int], sampling: Sampling, *, salt: str | None = None
) -> Pair:
    """Two legs, not submitted yet."""
    keys = (LegKey(name, 1, Phase.PREFILL), LegKey(name, 1, Phase.DECODE))
    room, rendezvous = _ROOMS.getrandbits(62), prefill.backend.info.rendezvous
    prefill_leg, decode_leg = (
        Leg(
            key=key,
            tokens=token_bytes(tokens),
            prompt_tokens=len(tokens),
            sampling=sampling,
            room=room,
            peer=peer.name,
            rendezvous=rendezvous,
            session=f"{name}@0",
            cache_salt=salt,
        )
        for key, peer in zip(keys, (decode, prefill), strict=True)
    )
    return Pair(prefill, decode, keys, (prefill_leg, decode_leg))


async def run(
    name: str, prefill: Node, decode: Node, tokens: Sequence[int], sampling: Sampling, *, salt: str | None = None
) -> Pair:
    """Submit both legs and wait for a good end of both."""
    legs = pair(name, prefill, decode, tokens, sampling, salt=salt)
    legs.submit()
    first, last = await legs.prefill_end(), await legs.decode_end()
    assert first.finish in (Finish.HANDED_OFF, Finish.LENGTH), first
    assert last.finish is Finish.LENGTH, last
    assert prefill.events.answers[legs.key[0]] == legs.answer[:1], "the first token comes from the prefill leg too"
    return legs


async def fetch(node: Node, source: Node, wanted: Sequence[bytes]) -> int:
    """Bring blocks from one node's pool into the other's, as the engine service does; how many are there then."""
    attach = AttachRequest(
        role="engine",
        model=node.pool.model,
        block_size=node.pool.block_size,
        block_bytes=node.pool.block_bytes,
        key_version=node.pool.key_version,
    )
    client = LocalClient(node.pool.socket_path, attach)
    task = asyncio.create_task(client.run())
    try:
        await client.wait_attached(5)
        sources = [PoolSource(node=source.name, first=0, last=len(wanted))]
        request = FetchRequest(id=f"fetch-{len(wanted)}", digests=b"".join(wanted), sources=sources)
        reply = await client.call(FETCH, request, 30)
        return reply.blocks
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
