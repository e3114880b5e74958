"""Nodes that die, refuse, give back and fail; clients that go: every request ends once, right, and frees everything."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from schemas.codec import encode
from schemas.phase import Phase, PhaseCommand
from schemas.serve import Finish, ServeReply
from tests.engine_cluster import Gate, until
from tests.router_stage import Connect, Reply, Stage, drop_connection, in_memory, stage

PROMPT = list(range(65, 105))


def slowly(seconds: float) -> Callable[[float], Awaitable[None]]:
    """Every iteration of an engine takes so long."""

    async def sleep(_: float) -> None:
        await asyncio.sleep(seconds)

    return sleep


def body(tokens: int, prompt: list[int] = PROMPT, **more: Any) -> dict[str, Any]:
    asked = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "return_token_ids": True, "stream": True}
    return asked | {"stream_options": {"include_usage": True}} | more


@pytest.fixture
def memory() -> Connect:
    return in_memory()


async def right_answer(tokens: int, prompt: list[int] = PROMPT) -> list[int]:
    """What a node that nothing happens to says."""
    async with stage(in_memory(), "calm") as s:
        return (await s.complete(prompt, tokens)).tokens


def first_is(s: Stage, state: str) -> bool:
    return next(iter(s.router.core.requests.values())).state == state


async def command(s: Stage, node: str, phase: Phase, epoch: int) -> None:
    order = PhaseCommand(
        id=f"{node}-{epoch}", t=0.0, node=node, phase=phase, epoch=epoch, reason="test", decision_id="d"
    )
    await s.router.app.bus.store(s.router.subjects.phase_command(node), encode(order), order.id)


async def test_node_killed_before_the_first_token_is_not_noticed(memory: Connect) -> None:
    expected = await right_answer(6)
    async with stage(memory, node_timeout_s=2.5) as s:
        gate = Gate(1)
        await s.engine("p1", sleep=gate.sleep, phase=Phase.PREFILL)
        await s.engine("d1", phase=Phase.DECODE)
        calling = asyncio.ensure_future(s.post("/v1/completions", body(6)))
        await gate.closed.wait()
        await s.engine("p2", phase=Phase.PREFILL)
        await s.engines.pop("p1").die()
        reply = await calling
        assert (reply.status, reply.tokens) == (200, expected)
        assert (reply.headers["x-ei-prefill-node"], reply.finish) == ("p2", "length")
        await s.settled()


async def test_node_killed_in_the_middle_of_a_stream_resumes_elsewhere(memory: Connect) -> None:
    expected = await right_answer(60)
    async with stage(memory, node_timeout_s=2.5) as s:
        await s.engine("p1", phase=Phase.PREFILL)
        await s.engine("d1", sleep=slowly(0.02), phase=Phase.DECODE)
        calling = asyncio.ensure_future(s.post("/v1/completions", body(60)))
        await until(lambda: any(len(r.answer) > 10 for r in s.router.core.requests.values()))
        await s.engine("d2", phase=Phase.DECODE)
        await s.engines.pop("d1").die()
        reply = await calling
        assert reply.tokens == expected
        assert reply.usage["completion_tokens"] == 60
        assert reply.usage["prompt_tokens"] == len(PROMPT)
        await s.settled()


async def test_last_node_killed_ends_the_stream_with_an_error(memory: Connect) -> None:
    async with stage(memory, node_timeout_s=2.5) as s:
        await s.engine("n1", sleep=slowly(0.02))
        calling = asyncio.ensure_future(s.post("/v1/completions", body(1000)))
        await until(lambda: any(len(r.answer) > 3 for r in s.router.core.requests.values()))
        await s.engines.pop("n1").die()
        reply = await calling
        assert reply.status == 200
        assert reply.events[-1]["error"]["type"] == "service_unavailable"
        assert "[DONE]" not in reply.body
        await s.settled()


async def test_case_7_prefill_error_frees_the_decode_leg(memory: Connect) -> None:
    expected = await right_answer(6)
    async with stage(memory) as s:
        gate = Gate(1)
        failing = await s.engine("p1", sleep=gate.sleep, phase=Phase.PREFILL)
        decode = await s.engine("d1", phase=Phase.DECODE)
        calling = asyncio.ensure_future(s.post("/v1/completions", body(6)))
        await gate.closed.wait()
        await s.engine("p2", phase=Phase.PREFILL)
        (key,) = failing.backend.legs
        runner = failing.engine.runner
        assert runner is not None
        loop = asyncio.get_running_loop()
        begun = loop.time()
        failing.backend.cancel(key)
        gate.open()
        reply = await calling
        assert loop.time() - begun < 1.0
        assert reply.tokens == expected
        await until(lambda: decode.backend.legs == {}, 1.0)
        await s.settled()


async def test_case_11_one_failure_does_not_stick_to_a_node(memory: Connect) -> None:
    async with stage(memory) as s:
        gate = Gate(1)
        node = await s.engine("n1", sleep=gate.sleep)
        calling = asyncio.ensure_future(s.post("/v1/completions", body(6)))
        await gate.closed.wait()
        (prefill,) = (key for key in node.backend.legs if key.phase is Phase.PREFILL)
        node.backend.cancel(prefill)
        gate.open()
        reply = await calling
        assert (reply.status, len(reply.tokens)) == (200, 6)
        for number in range(20):
            again = await s.complete([200 + number] * 20, 2)
            assert again.status == 200
        await s.settled()
        async with s.http.get(s.url + "/metrics") as response:
            assert "ei_router_retries_total 1.0" in await response.text()


async def test_case_13_attempts_have_rooms_of_their_own(memory: Connect) -> None:
    async with stage(memory, "n1", "n2") as s:
        sent: list[tuple[str, int, int]] = []
        legs = s.router.dispatcher._legs
        plain = legs.serve

        async def first_attempt_is_refused(leg: Any, deadline_s: float) -> ServeReply | None:
            sent.append((leg.phase, leg.attempt, leg.room))
            if leg.attempt == 1:
                return ServeReply(accepted=False, epoch=0, reason="full")
            return await plain(leg, deadline_s)

        legs.serve = first_attempt_is_refused  # type: ignore[method-assign]
        reply = await s.complete(PROMPT, 4)
        assert reply.status == 200
        rooms = {attempt: {room for _, a, room in sent if a == attempt} for _, attempt, _ in sent}
        first, second = rooms[1], rooms[max(rooms)]
        assert len(second) == 1
        assert not first & second
        await s.settled()


async def test_case_71_cancel_before_the_first_token_stops_the_prefill(memory: Connect) -> None:
    async with stage(memory) as s:
        engine = await s.engine("p1", sleep=slowly(0.1), phase=Phase.PREFILL, batch_tokens=40)
        await s.engine("d1", phase=Phase.DECODE)
        long = [list(range(number, number + 400)) for number in range(10)]
        leaving = [
            asyncio.ensure_future(drop_connection(s, body(5, prompt), lambda: len(s.router.core.requests) == 10))
            for prompt in long
        ]
        await asyncio.gather(*leaving)
        await until(lambda: not s.router.core.requests, 1.0)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        reply = await s.post("/v1/completions", body(1))
        assert reply.status == 200
        assert loop.time() - begun < 1.5
        assert engine.engine.runner is not None
        await s.settled()
        async with s.http.get(s.url + "/metrics") as response:
            assert 'ei_router_requests_total{outcome="cancelled"} 10.0' in await response.text()


async def test_case_67_disconnects_leave_no_load_behind(memory: Connect) -> None:
    random.seed(67)
    async with stage(memory) as s:
        for name in ("n1", "n2"):
            await s.engine(name, sleep=slowly(0.004), max_running=64)

        async def leave(number: int) -> None:
            sent = json.dumps(body(40, [number] * 50)).encode()
            _, writer = await asyncio.open_connection("127.0.0.1", urlsplit(s.url).port)
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(sent)}\r\n\r\n"
            writer.write(head.encode() + sent)
            await asyncio.sleep(random.choice((0, 0.002, 0.01, 0.03, 0.06, 0.1)))
            writer.transport.abort()

        for start in range(0, 400, 50):
            await asyncio.gather(*(leave(number) for number in range(start, start + 50)))
        await until(lambda: not s.router.core.requests, 1.0)
        s.assert_nothing_held()
        replies = [await s.complete([1000 + number] * 20, 2) for number in range(20)]
        chosen = [reply.headers["x-ei-prefill-node"] for reply in replies]
        assert 5 <= chosen.count("n1") <= 15
        await s.settled()


async def test_case_75_switch_moves_what_waits_and_lets_finish_what_runs(memory: Connect) -> None:
    async with stage(memory) as s:
        gate = Gate(1)
        await s.engine("p1", sleep=gate.sleep, phase=Phase.PREFILL, batch_tokens=16)
        await s.engine("d1", phase=Phase.DECODE)
        first = asyncio.ensure_future(s.post("/v1/completions", body(5)))
        await gate.closed.wait()
        await until(lambda: first_is(s, "prefilling"))
        inside = asyncio.ensure_future(s.post("/v1/completions", body(5, [300] * 40)))
        await until(lambda: any(r.state == "reserved" for r in s.router.core.requests.values()))
        prompts = [[number] * 40 for number in range(301, 304)]
        waiting = [asyncio.ensure_future(s.post("/v1/completions", body(5, prompt))) for prompt in prompts]
        await until(lambda: sum(r.state == "ready" for r in s.router.core.requests.values()) == 3)
        await s.engine("p2", phase=Phase.PREFILL)
        await command(s, "p1", Phase.DECODE, 1)
        moved = await asyncio.gather(*waiting)
        assert [reply.headers["x-ei-prefill-node"] for reply in moved] == ["p2"] * 3
        gate.open()
        ended = await asyncio.gather(first, inside)
        assert [reply.headers["x-ei-prefill-node"] for reply in ended] == ["p1"] * 2
        assert all(len(reply.tokens) == 5 and reply.finish == "length" for reply in [*ended, *moved])
        later = await s.complete(PROMPT, 2)
        assert later.headers["x-ei-prefill-node"] == "p2"
        await s.settled()


async def test_long_stream_survives_a_switch_of_its_decode_node(memory: Connect) -> None:
    expected = await right_answer(50)
    async with stage(memory) as s:
        await s.engine("p1", phase=Phase.PREFILL)
        await s.engine("d1", sleep=slowly(0.01), phase=Phase.DECODE)
        await s.engine("d2", phase=Phase.DECODE)
        s.router.core.on_command(
            PhaseCommand(id="x", t=0, node="d2", phase=Phase.PREFILL, epoch=1, reason="", decision_id="")
        )
        calling = asyncio.ensure_future(s.post("/v1/completions", body(50)))
        await until(lambda: any(len(r.answer) > 5 for r in s.router.core.requests.values()))
        await command(s, "d1", Phase.PREFILL, 1)
        reply = await calling
        assert reply.tokens == expected
        assert reply.headers["x-ei-decode-node"] == "d1"
        await s.settled()


async def test_lost_reply_messages_are_asked_for_again(memory: Connect) -> None:
    expected = await right_answer(40)
    async with stage(memory, "n1") as s:
        count = 0
        core = s.router.core
        hear = core.on_reply

        def every_third_is_lost(batch: Any, now: float) -> Any:
            nonlocal count
            count += 1
            lost = count % 3 == 0 and len(batch.updates) == 1 and batch.updates[0].finish is not Finish.HANDED_OFF
            return [] if lost else hear(batch, now)

        core.on_reply = every_third_is_lost  # type: ignore[method-assign]
        reply = await s.post("/v1/completions", body(40))
        assert reply.tokens == expected
        assert reply.finish == "length"
        await s.settled(8.0)


async def test_stopping_router_finishes_what_is_open_and_refuses_more(memory: Connect) -> None:
    async with stage(memory) as s:
        gate = Gate(1)
        await s.engine("n1", sleep=gate.sleep)
        calling = asyncio.ensure_future(s.post("/v1/completions", body(5)))
        await gate.closed.wait()
        s.running.stop.set()
        await until(s.router.app.stopping.is_set)
        refused = await s.complete(PROMPT, 2)
        assert (refused.status, refused.error["code"]) == (503, "stopping")
        gate.open()
        reply = await calling
        assert len(reply.tokens) == 5
        await s.running.task


async def test_router_that_may_not_wait_cancels_what_is_open(memory: Connect) -> None:
    async with stage(memory, drain_s=0.1) as s:
        engine = await s.engine("n1", sleep=slowly(0.05))
        calling = asyncio.ensure_future(s.post("/v1/completions", body(1000)))
        await until(lambda: any(len(r.answer) > 2 for r in s.router.core.requests.values()))
        s.running.stop.set()
        await s.running.task
        await until(lambda: engine.backend.legs == {}, 2.0)
        calling.cancel()
        await asyncio.wait([calling])


async def test_refusal_by_predicted_time(memory: Connect) -> None:
    async with stage(memory, "n1", ttft_bound_s=0.05) as s:
        reply: Reply = await s.complete(PROMPT, 2)
        assert (reply.status, reply.error["code"]) == (429, "ttft_bound")
        assert reply.error["message"].endswith("> 0.05 s")
        assert int(reply.headers["retry-after"]) >= 1
        await s.settled()
