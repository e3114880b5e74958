"""Phase switches of running engines: idle and under load, in both directions."""

import asyncio
from pathlib import Path

import pytest

from schemas.phase import Phase, SwitchState
from schemas.serve import Finish
from tests.engine_cluster import Cluster, Connect, cluster, prompt_of, until

P, P2, D, D2 = "node-0", "node-1", "node-2", "node-3"


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
async def test_an_idle_node_switches_within_a_fifth_of_a_second(connect: Connect, tmp_path: Path, phase: Phase) -> None:
    async with cluster(connect, tmp_path) as c:
        await c.engine(P)
        start = asyncio.get_running_loop().time()
        await c.router.command(P, phase, 1)
        state = await c.router.switched(P, 1)
        assert asyncio.get_running_loop().time() - start < 0.2
        assert state.took_s is not None
        assert state.took_s < 0.2
        assert (state.phase, state.moved, state.longest_running_s) == (phase, 0, None)


async def _answered(c: Cluster, number: int, nodes: dict[str, Phase]) -> int:
    """Send one request as a router would: again, elsewhere, whenever a leg is given back. Returns its attempts."""
    for attempt in range(1, 6):
        prefill = [node for node, phase in nodes.items() if phase is Phase.PREFILL]
        decode = [node for node, phase in nodes.items() if phase is Phase.DECODE]
        p, d = prefill[(number + attempt) % len(prefill)], decode[(number + attempt) % len(decode)]
        await c.router.place(f"q{number}", p, d, prompt_of(number, 60), 40, attempt=attempt)
        legs = [c.router.prefill(f"q{number}", attempt), c.router.decode(f"q{number}", attempt)]
        await until(lambda legs=legs: any(leg.finish is Finish.REQUEUED for leg in legs) or legs[1].ended.is_set(), 20)
        if not any(leg.finish is Finish.REQUEUED for leg in legs):
            assert legs[1].finish is Finish.LENGTH, legs[1].end
            assert len(legs[1].tokens) == 40
            return attempt
        for node in (p, d):
            await c.router.cancel(node, f"q{number}", attempt)
    raise AssertionError(f"q{number} was given back five times")


@pytest.mark.parametrize(("node", "phase"), [(P, Phase.DECODE), (D, Phase.PREFILL)])
async def test_a_switch_under_load_takes_no_longer_than_what_runs(
    connect: Connect, tmp_path: Path, node: str, phase: Phase
) -> None:
    async with cluster(connect, tmp_path) as c:
        for each in (P, P2, D, D2):
            await c.engine(each, preset="laptop", batch_tokens=64, max_running=4, speed=0.5)
        nodes = {P: Phase.PREFILL, P2: Phase.PREFILL, D: Phase.DECODE, D2: Phase.DECODE}
        for each, serves in nodes.items():
            await c.router.command(each, serves, 1)
            await c.router.switched(each, 1)
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(_answered(c, number, nodes)) for number in range(24)]
            runner = c.engines[node].engine.runner
            assert runner is not None
            await until(lambda: runner.core.counts().waiting > 0 and bool(c.engines[node].backend.legs))
            nodes[node] = phase
            await c.router.command(node, phase, 2)
            state = await c.router.switched(node, 2)
        attempts = [task.result() for task in asked]
        assert state.took_s is not None
        assert state.longest_running_s is not None
        assert state.took_s <= state.longest_running_s + 0.2
        assert state.moved > 0
        assert max(attempts) > 1, "what waited was answered elsewhere"
        order = [s.state for s in c.router.phases if (s.node, s.epoch) == (node, 2)]
        assert order == [SwitchState.DRAINING, SwitchState.SWITCHED]
        await c.assert_as_before()


async def test_case_75_a_long_stream_on_a_switching_node_ends_whole(connect: Connect, tmp_path: Path) -> None:
    """About a second to go on D when it is told to prefill: it ends there, and only then has D switched."""
    async with cluster(connect, tmp_path) as c:
        await c.engine(P)
        await c.engine(D, preset="laptop", speed=0.25)
        await c.router.place("long", P, D, prompt_of(1, 20), 40)
        await until(lambda: len(c.router.decode("long").tokens) > 2)
        await c.router.command(D, Phase.PREFILL, 1)
        state = await c.router.switched(D, 1)
        assert len(await c.router.answer("long")) == 40
        assert state.took_s is not None
        assert state.took_s > 0.5
        assert c.engines[D].backend.memory.device.used_blocks == 0, "no prefill used them: they are free"


async def test_an_engine_that_restarts_obeys_the_last_command(connect: Connect, tmp_path: Path) -> None:
    async with cluster(connect, tmp_path) as c:
        await c.router.command(P, Phase.DECODE, 7)
        await c.engine(P)
        state = await c.router.switched(P, 7)
        assert state.phase is Phase.DECODE
        runner = c.engines[P].engine.runner
        assert runner is not None
        assert (runner.core.switch.phase, runner.core.switch.epoch) == (Phase.DECODE, 7)


async def test_a_drain_gives_back_what_waits_and_ends_what_runs(connect: Connect, tmp_path: Path) -> None:
    async with cluster(connect, tmp_path) as c:
        await c.engine(P, preset="laptop", batch_tokens=64, speed=0.2)
        await c.engine(D)
        for number in range(6):
            await c.router.place(f"q{number}", P, D, prompt_of(number, 60), 4)
        await until(lambda: bool(c.engines[P].backend.legs))
        c.engines[P].stop.set()
        await asyncio.wait_for(c.engines[P].task, 5.0)
        ends = [c.router.prefill(f"q{number}") for number in range(6)]
        await until(lambda: all(leg.ended.is_set() for leg in ends))
        assert {leg.finish for leg in ends} == {Finish.HANDED_OFF, Finish.REQUEUED}
        for number, leg in enumerate(ends):
            if leg.finish is Finish.HANDED_OFF:
                assert len(await c.router.answer(f"q{number}")) == 4
