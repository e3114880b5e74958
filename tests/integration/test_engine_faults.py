"""Nodes and routers that die: what depended on them ends soon, what did not goes on."""

import asyncio
from pathlib import Path

from schemas.phase import Phase
from schemas.serve import Finish
from tests.engine_cluster import Connect, Gate, cluster, prompt_of, timed, until

P, P2, D, D2 = "node-0", "node-1", "node-2", "node-3"


async def test_case_3_memory_reserved_for_a_dead_prefill_node_comes_back(connect: Connect, tmp_path: Path) -> None:
    async with cluster(connect, tmp_path) as c:
        gate = Gate(1)
        await c.engine(P, make=timed(gate.sleep))
        for node in (P2, D):
            await c.engine(node, node_timeout_s=1.5)
        device = c.engines[D].backend.memory.device
        for number in range(4):
            await c.router.place(f"q{number}", P, D, prompt_of(number, 6), 2)
        await gate.closed.wait()
        await until(lambda: device.free_blocks < device.capacity)
        for number in range(4):
            await c.router.cancel(D, f"q{number}") if number % 2 else None
        await c.engines.pop(P).die()
        took_s = await until(lambda: device.free_blocks == device.capacity, 2.5)
        assert took_s < 2.0
        await c.router.place("fifth", P2, D, prompt_of(9, 6), 2)
        assert len(await c.router.answer("fifth")) == 2
        for number in (0, 2):
            assert c.router.decode(f"q{number}").finish is Finish.REQUEUED
        await c.assert_as_before()


async def test_a_dead_decode_node_gives_waiting_and_running_prefills_back(connect: Connect, tmp_path: Path) -> None:
    async with cluster(connect, tmp_path) as c:
        gate = Gate(1)
        await c.engine(P, make=timed(gate.sleep), batch_tokens=16)
        for node in (D, D2):
            await c.engine(node)
        for number in range(5):
            await c.router.place(f"q{number}", P, D, prompt_of(number, 16), 4)
        await gate.closed.wait()
        await c.engines.pop(D).die()
        gate.open()
        ends = [c.router.prefill(f"q{number}") for number in range(5)]
        await until(lambda: all(leg.ended.is_set() for leg in ends), 3.0)
        assert ends[0].finish is Finish.ERROR, "its token was already out"
        assert {leg.finish for leg in ends[2:]} == {Finish.REQUEUED}
        for number in range(1, 5):
            await c.router.place(f"q{number}", P, D2, prompt_of(number, 16), 4, attempt=2)
            assert len(await c.router.answer(f"q{number}", 2)) == 4
        await c.assert_as_before()


async def test_a_stream_outlives_the_node_that_prefilled_it(connect: Connect, tmp_path: Path) -> None:
    async with cluster(connect, tmp_path) as c:
        await c.engine(P)
        gate = Gate(5)
        await c.engine(D, make=timed(gate.sleep), node_timeout_s=0.5)
        await c.router.place("q", P, D, prompt_of(1, 20), 30)
        await gate.closed.wait()
        await c.router.prefill("q").ended.wait()
        await c.engines.pop(P).die()
        await asyncio.sleep(1.0)
        gate.open()
        assert len(await c.router.answer("q")) == 30


async def test_the_requests_of_a_silent_router_are_cancelled(connect: Connect, tmp_path: Path) -> None:
    async with cluster(connect, tmp_path) as c:
        gate = Gate(3)
        await c.engine(P, router_timeout_s=1.0)
        await c.engine(D, make=timed(gate.sleep), router_timeout_s=1.0)
        await c.router.place("q", P, D, prompt_of(1, 20), 30)
        await gate.closed.wait()
        await asyncio.sleep(1.5)
        assert not c.router.decode("q").ended.is_set(), "its heartbeats come"
        c.router.beating = False
        gate.open()
        await until(lambda: c.router.decode("q").ended.is_set(), 2.0)
        await c.assert_as_before()


async def test_case_9_waiting_for_a_turn_is_not_death(connect: Connect, tmp_path: Path) -> None:
    """Two run at a time for a second each; peers are lost after 2 s: all eight end well in about 4 s."""

    async def fifth(_: float) -> None:
        await asyncio.sleep(0.2)

    async with cluster(connect, tmp_path) as c:
        await c.engine(P, node_timeout_s=2.0)
        await c.engine(D, make=timed(fifth), node_timeout_s=2.0, max_running=2)
        for number in range(8):
            await c.router.place(f"q{number}", P, D, prompt_of(number, 20), 5)
        start = asyncio.get_running_loop().time()
        for number in range(8):
            await c.router.answer(f"q{number}")
        assert asyncio.get_running_loop().time() - start < 6.0


async def test_case_73_a_large_request_starts_although_small_ones_keep_coming(connect: Connect, tmp_path: Path) -> None:
    """D holds ten blocks. L takes eight of them; a small one of four comes every half second and runs for a second."""

    async def tenth(_: float) -> None:
        await asyncio.sleep(0.1)

    async with cluster(connect, tmp_path) as c:
        await c.engine(P)
        await c.engine(D, make=timed(tenth), l1_tokens=40, max_context_tokens=40)
        await c.router.place("s0", P, D, prompt_of(50, 6), 10)
        await until(lambda: len(c.engines[D].backend.legs) == 1)
        await c.router.place("large", P, D, prompt_of(51, 28), 4)
        start = asyncio.get_running_loop().time()
        number = 0
        while not c.router.decode("large").tokens:
            number += 1
            await c.router.place(f"s{number}", P, D, prompt_of(60 + number, 6), 10)
            for _ in range(50):
                await asyncio.sleep(0.01)
                if c.router.decode("large").tokens:
                    break
            assert asyncio.get_running_loop().time() - start < 2.5, "starved"
        for each in range(number + 1):
            await c.router.answer(f"s{each}")


async def test_a_restarted_engine_serves_again_and_has_lost_what_it_ran(connect: Connect, tmp_path: Path) -> None:
    async with cluster(connect, tmp_path) as c:
        await c.engine(P)
        gate = Gate(2)
        await c.engine(D, make=timed(gate.sleep))
        await c.router.place("q", P, D, prompt_of(1, 20), 30)
        await gate.closed.wait()
        await c.engines.pop(D).die()
        gate.open()
        await c.engine(D)
        await c.router.place("q", P, D, prompt_of(1, 20), 30, attempt=2)
        assert len(await c.router.answer("q", 2)) == 30
        assert c.router.leg("q", 1, Phase.DECODE).end is None
