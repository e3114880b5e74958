"""A cancel in every state a request can be in: within a second everything is as if it had never come."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from schemas.phase import Phase
from schemas.serve import FetchSource, Finish, RequestState, Sampling, ServeRequest
from services.bus import Delivery
from services.engine.core.timing import Coefficients
from tests.engine_cluster import ROUTER, Cluster, Connect, Gate, S, cluster, prompt_of, timed, until

P, D, BOTH_PHASES = "node-0", "node-1", (Phase.PREFILL, Phase.DECODE)
SLOW = Coefficients(c1=10.0)
"""So slow to compute that no fetch is given up."""


async def _never(_: Delivery) -> bytes:
    await asyncio.Event().wait()
    return b""


@dataclass
class Scene:
    """Two nodes with pools and gates, and request `q` between them."""

    cluster: Cluster
    prefill_gate: Gate
    decode_gate: Gate

    @property
    def router(self):
        return self.cluster.router

    async def place(self, **keys: object) -> None:
        await self.router.place("q", P, D, prompt_of(1, 64), 40, **keys)

    def leg_state(self, node: str, phase: Phase) -> RequestState | None:
        runner = self.cluster.engines[node].engine.runner
        assert runner is not None
        for leg in runner.core.table.of("q", phase):
            return leg.state
        return None

    async def reach(self, node: str, phase: Phase, state: RequestState) -> None:
        await until(lambda: self.leg_state(node, phase) is state)


async def unheard_of(scene: Scene) -> None:
    """The router knows the request, no engine does yet: its cancel overtakes it, and it is not taken afterwards."""
    for node in (P, D):
        assert await scene.router.cancel(node, "q") is False
    for node, phase, peer in ((D, Phase.DECODE, P), (P, Phase.PREFILL, D)):
        message = ServeRequest(
            id="q",
            attempt=1,
            phase=phase,
            router=ROUTER,
            peer=peer,
            room=1,
            prompt_tokens=1,
            tokens=bytes(4),
            sampling=Sampling(max_new_tokens=4),
        )
        reply = await scene.router.serve(node, message)
        assert (reply.accepted, reply.reason) == (False, "cancelled")


async def queued(scene: Scene) -> None:
    """Its prompt is being read from a router that does not answer; the decode leg is held."""
    await scene.router.bus.respond(S.prompt(ROUTER), _never)
    for node, phase, peer in ((D, Phase.DECODE, P), (P, Phase.PREFILL, D)):
        message = ServeRequest(
            id="q",
            attempt=1,
            phase=phase,
            router=ROUTER,
            peer=peer,
            room=1,
            prompt_tokens=64,
            sampling=Sampling(max_new_tokens=4),
        )
        assert (await scene.router.serve(node, message)).accepted
    await scene.reach(P, Phase.PREFILL, RequestState.QUEUED)


async def fetching(scene: Scene) -> None:
    """Its prefix is to come from a pool that does not answer."""
    await scene.router.bus.respond(S.pool("lease", "node-9"), _never)
    await scene.place(fetch=[FetchSource(node="node-9", first=0, last=15)])
    await scene.reach(P, Phase.PREFILL, RequestState.FETCHING)


async def ready(scene: Scene) -> None:
    """Its decode node has no room: another request fills it."""
    scene.decode_gate.number = 2
    await scene.router.place("other", P, D, prompt_of(2, 2000), 40)
    await scene.decode_gate.closed.wait()
    await scene.router.place("filler", P, D, prompt_of(3, 2000), 40)
    await until(lambda: len(scene.cluster.engines[D].backend.legs) == 2)
    await scene.place()
    await scene.reach(P, Phase.PREFILL, RequestState.READY)
    for other in ("other", "filler"):
        for node in (P, D):
            await scene.router.cancel(node, other)


async def reserved(scene: Scene) -> None:
    """Inside both engines, behind another request whose iteration runs."""
    scene.prefill_gate.number = 1
    await scene.router.place("other", P, D, prompt_of(2, 16), 4)
    await scene.prefill_gate.closed.wait()
    await scene.place()
    await scene.reach(P, Phase.PREFILL, RequestState.RESERVED)
    await scene.reach(D, Phase.DECODE, RequestState.RESERVED)
    for node in (P, D):
        await scene.router.cancel(node, "other")


async def prefilling(scene: Scene) -> None:
    """In the running iteration; device memory is reserved on the decode node."""
    scene.prefill_gate.number = 1
    await scene.place()
    await scene.prefill_gate.closed.wait()
    await scene.reach(P, Phase.PREFILL, RequestState.PREFILLING)
    await scene.reach(D, Phase.DECODE, RequestState.RESERVED)


async def transferring(scene: Scene) -> None:
    """Its KV is on the way between the two devices."""
    scene.prefill_gate.number, scene.decode_gate.number = 2, 1
    await scene.place()
    await scene.decode_gate.closed.wait()
    await scene.reach(P, Phase.PREFILL, RequestState.TRANSFERRING)
    await scene.reach(D, Phase.DECODE, RequestState.TRANSFERRING)


async def decoding(scene: Scene) -> None:
    """Streaming; the prefill leg is over."""
    scene.decode_gate.number = 5
    await scene.place()
    await scene.decode_gate.closed.wait()
    await scene.reach(D, Phase.DECODE, RequestState.DECODING)
    await scene.router.prefill("q").ended.wait()


async def ended(scene: Scene) -> None:
    """Answered: the cancel comes too late and does nothing."""
    await scene.place()
    await scene.router.answer("q")
    await scene.router.prefill("q").ended.wait()


CASES: dict[RequestState, Callable[[Scene], Awaitable[None]]] = {
    RequestState.RECEIVED: unheard_of,
    RequestState.MATCHED: unheard_of,
    RequestState.PLACED: unheard_of,
    RequestState.QUEUED: queued,
    RequestState.FETCHING: fetching,
    RequestState.READY: ready,
    RequestState.RESERVED: reserved,
    RequestState.PREFILLING: prefilling,
    RequestState.TRANSFERRING: transferring,
    RequestState.DECODING: decoding,
    RequestState.ENDED: ended,
}
AT_REST = (RequestState.RECEIVED, RequestState.MATCHED, RequestState.PLACED, RequestState.ENDED)


@asynccontextmanager
async def scene_of(connect: Connect, path: Path) -> AsyncIterator[Scene]:
    async with cluster(connect, path) as c:
        scene = Scene(c, Gate(), Gate())
        await c.engine(P, pool=True, make=timed(scene.prefill_gate.sleep, times=SLOW))
        await c.engine(D, pool=True, make=timed(scene.decode_gate.sleep, times=SLOW))
        yield scene


@pytest.mark.parametrize("state", list(RequestState))
async def test_a_cancelled_request_leaves_nothing(connect: Connect, tmp_path: Path, state: RequestState) -> None:
    assert state in CASES, f"no case for {state}: how is a request cancelled there?"
    async with scene_of(connect, tmp_path) as scene:
        await CASES[state](scene)
        known = [await scene.router.cancel(node, "q") for node in (P, D)]
        if state in AT_REST:
            assert known == [False, False]
        else:
            assert any(known)
        scene.prefill_gate.open()
        scene.decode_gate.open()
        await scene.cluster.assert_as_before()
        if state not in AT_REST:
            await until(lambda: scene.router.decode("q").ended.is_set())
            assert scene.router.decode("q").finish is Finish.CANCELLED


async def test_a_cancel_of_one_leg_frees_the_other_too(connect: Connect, tmp_path: Path) -> None:
    async with scene_of(connect, tmp_path) as scene:
        await prefilling(scene)
        await scene.router.cancel(P, "q")
        scene.prefill_gate.open()
        await scene.cluster.assert_as_before()
        await until(lambda: scene.router.decode("q").ended.is_set())
        assert scene.router.decode("q").finish is Finish.CANCELLED


async def test_case_1_memory_stays_reserved_while_it_is_written(connect: Connect, tmp_path: Path) -> None:
    """A is cancelled while its KV arrives. B is given other blocks, and A's are free only when the write has ended."""
    async with cluster(connect, tmp_path) as c:
        gate = Gate(1)
        await c.engine(P, make=timed())
        await c.engine(D, make=timed(gate.sleep), l1_tokens=16, max_context_tokens=16)
        device = c.engines[D].backend.memory.device
        await c.router.place("a", P, D, prompt_of(1, 7), 1 + 0)
        await c.router.answer("a")
        await c.router.place("b", P, D, prompt_of(2, 6), 2)
        await gate.closed.wait()
        await c.router.cancel(D, "b")
        await asyncio.sleep(0.05)
        assert device.free_blocks == 2, "the writer has not acknowledged"
        await c.router.place("c", P, D, prompt_of(3, 6), 2)
        assert len(await c.router.answer("c")) == 2
        assert device.free_blocks == 2
        gate.open()
        await until(lambda: device.free_blocks == 4)


async def test_case_67_cancels_at_random_points_leak_no_load(connect: Connect, tmp_path: Path) -> None:
    async with cluster(connect, tmp_path) as c:
        for node in (P, D):
            await c.engine(node, pool=True, preset="laptop", speed=4.0)
        for number in range(100):
            await c.router.place(f"q{number}", P, D, prompt_of(number, 40), 10)
            if number % 4:
                await asyncio.sleep(number % 7 * 0.002)
            await asyncio.gather(*(c.router.cancel(node, f"q{number}") for node in (P, D)))
        await c.assert_as_before()
        for node in (P, D):
            runner = c.engines[node].engine.runner
            assert runner is not None
            counts = runner.core.counts()
            assert (counts.waiting, counts.running_prefill, counts.running_decode) == (0, 0, 0)


async def test_case_71_cancelled_prefills_do_not_hold_up_the_next(connect: Connect, tmp_path: Path) -> None:
    """Chunks of 0.1 s, ten prompts of ten chunks: a short one that comes after their cancel starts with the next."""
    async with cluster(connect, tmp_path) as c:
        coefficients = {"batch_tokens": 40, "max_context_tokens": 1024}

        async def chunk(_: float) -> None:
            await asyncio.sleep(0.1)

        await c.engine(P, make=timed(chunk), **coefficients)
        await c.engine(D, make=timed())
        for number in range(10):
            await c.router.place(f"q{number}", P, D, prompt_of(number, 400), 4)
        await asyncio.sleep(0.05)
        for number in range(10):
            await asyncio.gather(*(c.router.cancel(node, f"q{number}") for node in (P, D)))
        await c.router.place("short", P, D, prompt_of(99, 30), 4)
        took_s = await until(lambda: RequestState.PREFILLING in c.router.prefill("short").states)
        assert took_s < 0.25, "the chunk under way, and no more"
        await c.router.answer("short")
        await c.assert_as_before()
