"""A whole timed cluster in mode on: it learns its iteration times and changes the split to what the work asks for."""

import asyncio
import json
import random

import pytest

from tests.cluster import Cluster

SETTINGS = {
    "planner.mode": "on",
    "planner.warm_up": "false",
    "planner.slice_s": "1.5",
    "planner.slices": "4",
    "planner.decide.cooldown_s": "2",
    "planner.model.warm_up_least_s": "2",
    "planner.model.newest": "3",
    "planner.model.refit_s": "0.5",
    "planner.model.target_error": "0.2",
    "engine.timed.preset": "glm-5.2",
}
UP = ("--engine", "timed", "--nodes", "4", "--split", "1P3D")


async def agent(cluster: Cluster, name: str, over: asyncio.Event) -> int:
    """Fresh prompts and short answers: work for prefill, hardly any for decode."""
    draw, answered = random.Random(name), 0
    while not over.is_set():
        prompt = [draw.randint(32, 126) for _ in range(1000)]
        answer = await cluster.complete(prompt, 3, branch=f"{name}-{answered}")
        assert len(answer.output) == 3
        answered += 1
    return answered


@pytest.mark.timeout(180)
async def test_a_split_that_starves_prefill_is_changed_without_being_asked() -> None:
    settings = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
    async with Cluster.up(*UP, *settings) as cluster:
        over = asyncio.Event()
        agents = [asyncio.create_task(agent(cluster, f"agent-{number}", over)) for number in range(8)]
        try:
            async with asyncio.timeout(100):
                while list((await cluster.phases()).values()).count("prefill") < 2:
                    await asyncio.sleep(0.5)
        finally:
            over.set()
            answered = sum(await asyncio.gather(*agents))
        assert answered > 8
        last = json.loads(await cluster.command("explain", "--json"))
        shown = await cluster.command("explain", last["id"])
        status = await cluster.command("status")
    assert last["mode"] == "on"
    assert last["models"]
    assert last["split_now"] in shown
    assert "last decision" in status
