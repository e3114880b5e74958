"""Engine services over a bus, in memory and over a real broker: requests on one node and on two."""

from pathlib import Path

import pytest

from schemas.phase import Phase
from schemas.serve import Finish, RequestState
from schemas.telemetry import NODE_TELEMETRY, NodeTelemetry
from services.bus import Delivery
from tests.engine_cluster import Connect, S, cluster, prompt_of, until

NODES = ("node-0", "node-1")


@pytest.mark.parametrize("decode", NODES)
async def test_a_request_is_answered(connect: Connect, tmp_path: Path, decode: str) -> None:
    async with cluster(connect, tmp_path) as c:
        for node in NODES:
            await c.engine(node)
        await c.router.place("q", "node-0", decode, prompt_of(1, 30), 8)
        answer = await c.router.answer("q")
        assert len(answer) == 8
        assert c.router.prefill("q").tokens == answer[:1]
        assert c.router.prefill("q").finish is Finish.HANDED_OFF
        assert c.router.prefill("q").states[-1] is RequestState.TRANSFERRING
        assert c.router.decode("q").states == [
            RequestState.QUEUED,
            RequestState.RESERVED,
            RequestState.TRANSFERRING,
            RequestState.DECODING,
        ]
        for running in c.engines.values():
            await until(lambda r=running: r.backend.legs == {})
            running.assert_empty()


async def test_the_same_prompt_has_the_same_answer_everywhere(connect: Connect, tmp_path: Path) -> None:
    async with cluster(connect, tmp_path) as c:
        for node in NODES:
            await c.engine(node)
        answers = []
        for number, (prefill, decode) in enumerate((p, d) for p in NODES for d in NODES):
            await c.router.place(f"q{number}", prefill, decode, prompt_of(1, 33), 12)
            answers.append(await c.router.answer(f"q{number}"))
        assert answers == [answers[0]] * 4


async def test_an_answer_of_one_token_ends_in_both_legs(connect: Connect, tmp_path: Path) -> None:
    async with cluster(connect, tmp_path) as c:
        for node in NODES:
            await c.engine(node)
        await c.router.place("q", "node-0", "node-1", prompt_of(2, 9), 1)
        assert len(await c.router.answer("q")) == 1
        await c.router.prefill("q").ended.wait()
        assert c.router.prefill("q").finish is Finish.LENGTH
        assert c.router.leg("q", 1, Phase.DECODE).finish is Finish.LENGTH


async def test_who_asks_who_is_here_need_not_wait_for_a_heartbeat(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.engine.reports.HEARTBEAT_S", 600.0)
    heard: list[str] = []

    async def on_message(delivery: Delivery) -> None:
        heard.append(delivery.subject)

    async with cluster(connect, tmp_path) as c:
        await c.engine("node-0")
        asker = await connect()
        await asker.subscribe(S.node_hello("node-0"), on_message)
        await asker.subscribe(S.telemetry_node("node-0"), on_message)
        await asker.publish(S.node_hello_query(), b"")
        await until(lambda: {S.node_hello("node-0"), S.telemetry_node("node-0")} <= set(heard))


async def test_heartbeats_tell_how_long_running_answers_are(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.engine.reports.HEARTBEAT_S", 0.01)
    beats: list[NodeTelemetry] = []

    async def on_beat(delivery: Delivery) -> None:
        beats.append(NODE_TELEMETRY.decode(delivery.data))

    async with cluster(connect, tmp_path) as c:
        for node in NODES:
            await c.engine(node)
        await (await connect()).subscribe(S.telemetry_node("node-1"), on_beat)
        await c.router.place("q", "node-0", "node-1", prompt_of(1, 30), 400)
        await c.router.answer("q")
        await until(lambda: bool(beats) and beats[-1].decoding_by_length == [])
        longest = [len(beat.decoding_by_length) for beat in beats if beat.running_decode]
        assert all(sum(beat.decoding_by_length) == beat.running_decode for beat in beats)
        assert longest == sorted(longest)
        assert 5 < longest[-1] <= 9, "of 400 tokens at least 32 and at most all had been given"
