"""A whole cluster whose processes are killed while agents work."""

import asyncio

import pytest

from services.cli.demo.reference import timed_answer
from services.engine.timed.settings import TimedSettings
from tests.cluster import Cluster


@pytest.mark.timeout(180)
async def test_requests_wait_for_the_only_decode_node_to_come_back() -> None:
    prompts = [[(number * 37 + index * 7) % 3000 + 3 for index in range(200)] for number in range(12)]
    async with Cluster.up("--engine", "timed", "--nodes", "3") as cluster:
        running = [asyncio.create_task(cluster.complete(prompt, 8)) for prompt in prompts[:6]]
        cluster.kill("engine-node-2")
        await asyncio.sleep(0.3)
        late = [asyncio.create_task(cluster.complete(prompt, 8)) for prompt in prompts[6:]]
        answers = await asyncio.gather(*running, *late)
    expected = [timed_answer(prompt, 8, TimedSettings()) for prompt in prompts]
    assert [answer.output for answer in answers] == expected
