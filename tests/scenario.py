"""One story that touches every way KV can reach a request; told to timed and to SGLang clusters alike.

Each step returns what it asked and got, so that all answers can be compared with one plain engine afterwards.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from services.cli.demo.act import Played
from services.cli.demo.compare import Reference, compare
from tests.cluster import Answer, Cluster

VOCABULARY = 4000
"""Token ids below this are ordinary text in every model that is used here."""


@dataclass
class Story:
    """A cluster of three nodes, 2P1D, block size 16, and everything it was asked so far."""

    cluster: Cluster
    answer_tokens: int = 12
    seed: int = 7
    told: list[tuple[str, list[int], Answer]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def words(self, count: int) -> list[int]:
        """Token ids that no earlier prompt contains in this order."""
        return [self._random.randrange(3, VOCABULARY) for _ in range(count)]

    async def ask(self, step: str, prompt: Sequence[int], branch: str, **headers: str) -> Answer:
        sent = {f"x-ei-branch-{name}": value for name, value in headers.items()}
        answer = await self.cluster.complete(prompt, self.answer_tokens, branch=branch, headers=sent)
        assert len(answer.output) == self.answer_tokens, f"{step}: {len(answer.output)} tokens"
        self.told.append((step, list(prompt), answer))
        return answer

    async def settled(self) -> None:
        """Location events and branch events of the last answers have reached the directory."""
        await asyncio.sleep(1.0)


def reused(answer: Answer, tokens: int) -> None:
    """The answer reused exactly so many prompt tokens."""
    assert answer.cached_tokens == tokens, f"{answer.cached_tokens} cached tokens instead of {tokens}: {answer}"


async def equal_to(reference: Reference, story: Story) -> None:
    """Every answer of the story is what the reference says to the same prompt, token by token."""
    played = [Played(step, tuple(prompt), tuple(answer.output)) for step, prompt, answer in story.told]
    await reference.start()
    try:
        compared = await compare(played, reference, lambda done: None)
        assert compared.differences == []
    finally:
        await reference.stop()


async def cold_local_fork_compact(story: Story) -> None:
    """cold; the same branch again; a fork; a compaction: each reuses every full block that exists."""
    first = story.words(400)
    cold = await story.ask("cold", first, "a")
    reused(cold, 0)
    await story.settled()
    second = first + cold.output + story.words(60)
    warm = await story.ask("local reuse", second, "a")
    reused(warm, (len(first) + len(cold.output) - 1) // 16 * 16)
    await story.settled()
    fork = await story.ask("fork", second + warm.output + story.words(40), "a-fork", parent="a", kind="fork")
    reused(fork, (len(second) + len(warm.output) - 1) // 16 * 16)
    compacted = first[:96] + story.words(80)
    shorter = await story.ask("compaction", compacted, "a", version="1")
    reused(shorter, 96)


async def peer_reuse(story: Story) -> None:
    """The node that holds a context becomes decode: the other prefill node reads the context from its host memory."""
    prompt = story.words(350)
    first = await story.ask("before the switch", prompt, "p")
    await story.settled()
    target = {"node-0": "node-1", "node-1": "node-0"}
    await story.cluster.command("phase", first.prefill_node, "decode")
    longer = prompt + first.output + story.words(30)
    moved = await story.ask("peer reuse", longer, "p")
    assert moved.prefill_node == target[first.prefill_node]
    reused(moved, (len(prompt) + len(first.output) - 1) // 16 * 16)
    await story.cluster.command("phase", first.prefill_node, "prefill")


async def switch_under_load(story: Story, agents: int = 4) -> None:
    """Agents talk without a break while node-1 goes to decode and back; every answer counts."""
    stop = asyncio.Event()

    async def agent(name: str) -> None:
        context = story.words(150)
        while not stop.is_set():
            answer = await story.ask(f"under load {name}", context, name)
            context = context + answer.output + story.words(20)

    async with asyncio.TaskGroup() as group:
        for number in range(agents):
            group.create_task(agent(f"load-{number}"))
        await asyncio.sleep(2.0)
        await story.cluster.command("phase", "node-1", "decode")
        await asyncio.sleep(2.0)
        await story.cluster.command("phase", "node-1", "prefill")
        await asyncio.sleep(2.0)
        stop.set()


async def engine_killed(story: Story, ready_s: float) -> None:
    """kill -9 of the engine that holds a context; it comes back and reads the context from the arena it left."""
    prompt = story.words(300)
    first = await story.ask("before the kill", prompt, "k")
    await story.settled()
    node = first.prefill_node
    former = await entry_of(story.cluster, node)
    story.cluster.kill(f"engine-{node}")
    async with asyncio.timeout(ready_s):
        while (now := await entry_of(story.cluster, node))["engine_incarnation"] == former["engine_incarnation"]:
            await asyncio.sleep(0.1)
        while not (now["alive"] and now["ready"]):
            await asyncio.sleep(0.1)
            now = await entry_of(story.cluster, node)
    other = {"node-0": "node-1", "node-1": "node-0"}[node]
    await story.cluster.command("phase", other, "decode")
    again = await story.ask("after the kill", prompt + first.output + story.words(20), "k")
    assert again.prefill_node == node
    reused(again, (len(prompt) + len(first.output) - 1) // 16 * 16)
    await story.cluster.command("phase", other, "prefill")


async def entry_of(cluster: Cluster, node: str) -> dict[str, Any]:
    """What the router says of a node."""
    nodes = (await cluster.get("/v1/cluster"))["nodes"]
    return next(entry for entry in nodes if entry["node"] == node)
