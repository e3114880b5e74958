"""How long a switch takes, idle and under load, and what it loses: `python -m bench.switch [--quick] [--json FILE]`.

A cluster of timed nodes; the split goes back and forth by `query.planner.split`, as `ei split` orders it. Idle: nothing
runs. Loaded: agents take turns with long answers, so that the switching node has running requests; its excess is the
switch time minus the longest request that was running on it at the command. Every answer under load is compared, token
by token, with the timed engine's rule.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schemas.phase import PlannerQuery, PlannerReply
from services.cli.cluster.local import LocalCluster, local_cluster
from services.cli.demo.reference import timed_answer
from services.cli.orders import order
from services.cli.replay.client import Answer, CompletionClient
from services.cli.replay.command import http_session
from services.cli.replay.contexts import TokenSource
from services.cli.replay.tokens import Tokens
from services.engine.timed.settings import TimedSettings

PORT = 18_400
NODES = 4
SPLITS = ("1P3D", "2P2D")
READY_S = 60.0
PRESET = "glm-5.2"
"""Iteration times of the reference model: 17 ms a decode iteration, about 0.1 ms a prefilled token."""
CONTEXT_TOKENS = 4096
PAUSE_S = 0.5
"""A tool call: the next request of an agent comes so long after the answer."""


@dataclass
class Load:
    """Agents that keep every node busy: each sends a prompt, reads a long answer, and goes on from both."""

    client: CompletionClient
    source: TokenSource
    agents: int
    answer_tokens: int
    asked: list[tuple[Tokens, Answer]] = field(default_factory=list)
    failed: int = 0
    over: bool = False

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for agent in range(self.agents):
                tasks.create_task(self._agent(agent))

    async def _agent(self, agent: int) -> None:
        turn = 0
        context = self.source.tokens(f"agent {agent}", CONTEXT_TOKENS)
        while not self.over:
            answer = await self.client.complete(context, self.answer_tokens, None, lambda _: None)
            if answer.error:
                self.failed += 1
                return
            self.asked.append((context, answer))
            turn += 1
            await asyncio.sleep(PAUSE_S)
            context = context + answer.tokens + self.source.tokens(f"agent {agent} turn {turn}", 64)

    def wrong_outputs(self) -> int:
        """Answers that differ from the timed engine's rule."""
        rule = TimedSettings()
        return sum(
            answer.tokens.tolist() != timed_answer(prompt, len(answer.tokens), rule) for prompt, answer in self.asked
        )


@dataclass
class Measured:
    """What a run found; times in seconds."""

    idle: list[float] = field(default_factory=list)
    excess: list[float] = field(default_factory=list)
    loaded: list[float] = field(default_factory=list)
    failed: int = 0
    lost_tokens: int = 0
    wrong_outputs: int = 0
    requests: int = 0


async def switch(cluster: LocalCluster, split: str) -> PlannerReply:
    return await order(cluster.target, "split", PlannerQuery(split=split, reason="bench"), lambda _: None)


async def measure(each_way: int, agents: int, answer_tokens: int, work: Path) -> Measured:
    found = Measured()
    arguments = ["--engine", "timed", "--nodes", str(NODES), "--split", SPLITS[1]]
    arguments += ["--set", f"engine.timed.preset={PRESET}", "--set", "kvpool.capacity_blocks=16384"]
    async with local_cluster(PORT, arguments, work / "cluster.log", READY_S) as cluster, http_session() as session:
        for _ in range(each_way):
            for split in SPLITS:
                reply = await switch(cluster, split)
                assert reply.took_s is not None
                found.idle.append(reply.took_s)
        client = CompletionClient(session, cluster.target.url, "")
        load = Load(client, TokenSource(range(100, 228), "bench"), agents, answer_tokens)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(load.run())
            await asyncio.sleep(2.0)
            for _ in range(each_way):
                for split in SPLITS:
                    _add(found, await switch(cluster, split))
                    await asyncio.sleep(0.5)
            load.over = True
            await running
        found.requests = len(load.asked)
        found.failed += load.failed
        found.wrong_outputs = load.wrong_outputs()
    return found


def _add(found: Measured, reply: PlannerReply) -> None:
    assert reply.took_s is not None
    longest = max((node.longest_running_s or 0.0 for node in reply.nodes), default=0.0)
    found.loaded.append(reply.took_s)
    found.excess.append(reply.took_s - longest)
    found.failed += reply.failed
    found.lost_tokens += reply.lost_tokens


def result(found: Measured, *, quick: bool) -> dict[str, Any]:
    return {
        "bench": "switch",
        "quick": quick,
        "idle_took_s": statistics.median(found.idle),
        "loaded_excess_s": statistics.median(found.excess),
        "loaded_took_s": statistics.median(found.loaded),
        "failed": found.failed,
        "lost_tokens": found.lost_tokens,
        "wrong_outputs": found.wrong_outputs,
        "switches": len(found.idle) + len(found.loaded),
        "requests": found.requests,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.switch", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="5 switches each way, a small load")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    each_way, agents, answer = (5, 12, 96) if options.quick else (15, 24, 192)
    with tempfile.TemporaryDirectory() as work:
        found = asyncio.run(measure(each_way, agents, answer, Path(work)))
    line = result(found, quick=options.quick)
    for key, value in line.items():
        print(f"{key:18} {value:.4f}" if isinstance(value, float) else f"{key:18} {value}")
    if options.json is not None:
        options.json.write_text(json.dumps(line) + "\n")
    print(json.dumps(line))
    return 1 if found.failed or found.wrong_outputs else 0


if __name__ == "__main__":
    sys.exit(main())
