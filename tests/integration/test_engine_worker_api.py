"""The HTTP worker API of the timed engine, as sglang-router uses it."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from services.bus import MemoryBus, MemoryHub
from tests.engine_cluster import Running, cluster, prompt_of


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Running]:
    hub = MemoryHub()

    async def connect() -> MemoryBus:
        return MemoryBus(hub)

    async with cluster(connect, tmp_path) as c:
        yield await c.engine("node-0", max_running=2)


@pytest.fixture
async def session(engine: Running) -> AsyncIterator[aiohttp.ClientSession]:
    port = engine.engine._app.http_port
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        yield session


async def test_what_the_router_probes_is_answered(session: aiohttp.ClientSession) -> None:
    for path in ("/health", "/server_info", "/get_server_info", "/model_info"):
        async with session.get(path) as response:
            assert response.status == 200, path
    async with session.get("/model_info") as response:
        assert (await response.json())["model_path"] == "timed"


async def test_generate_answers_and_reuses(session: aiohttp.ClientSession, engine: Running) -> None:
    body = {
        "input_ids": prompt_of(1, 41),
        "sampling_params": {"max_new_tokens": 6, "temperature": 0},
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": 8998,
        "bootstrap_room": 7,
    }
    answers = []
    for cached in (0, 40):
        async with session.post("/generate", json=body) as response:
            answer = await response.json()
        assert response.status == 200
        assert answer["meta_info"]["cached_tokens"] == cached
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 6}
        answers.append(answer["output_ids"])
    assert answers[0] == answers[1]
    engine.assert_empty()


async def test_generate_streams(session: aiohttp.ClientSession) -> None:
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 5}, "stream": True}
    async with session.post("/generate", json=body) as response:
        lines = [line async for line in response.content if line.startswith(b"data: ")]
    assert lines[-1] == b"data: [DONE]\n"
    last = json.loads(lines[-2][6:])
    assert len(last["output_ids"]) == 5
    assert last["meta_info"]["finish_reason"]["type"] == "length"


async def test_more_requests_than_may_run_wait_their_turn(session: aiohttp.ClientSession, engine: Running) -> None:
    async def one(seed: int) -> int:
        body = {"input_ids": prompt_of(seed, 30), "sampling_params": {"max_new_tokens": 4}}
        async with session.post("/generate", json=body) as response:
            return len((await response.json())["output_ids"])

    assert await asyncio.gather(*(one(seed) for seed in range(12))) == [4] * 12
    engine.assert_empty()


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"input_ids": []}, "0 input_ids"),
        ({"input_ids": [1] * 3000}, "2048"),
        ({"input_ids": [-1]}, "u32"),
        ({"text": "no tokens"}, "input_ids"),
    ],
)
async def test_bad_bodies_are_named(session: aiohttp.ClientSession, body: dict[str, object], named: str) -> None:
    async with session.post("/generate", json=body) as response:
        assert response.status == 400
        assert named in await response.text()
