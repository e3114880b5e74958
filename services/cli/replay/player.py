"""Agents against a running cluster: closed loop (so many at a time) or open loop (so many started a minute)."""

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence

from services.btrace import Play
from services.cli.replay.agent import AgentRun, Stage


async def play(plays: Sequence[Play], stage: Stage) -> None:
    """Play until all agents are done, or until the duration is over and what then runs has ended.

    Closed loop: an agent that ends is replaced at once by the next one.
    """
    stage.started_at = time.monotonic()
    queue = _queue(plays, stage)
    async with asyncio.TaskGroup() as tasks:
        if stage.pace.rate_per_min is None:
            for _ in range(stage.pace.agents):
                tasks.create_task(_lane(queue, stage))
            return
        for number, (one, instance) in enumerate(queue):
            due = stage.started_at + number * 60 / stage.pace.rate_per_min
            await asyncio.sleep(due - time.monotonic())
            if stage.over:
                return
            tasks.create_task(AgentRun(stage, one, instance).run())


def _queue(plays: Sequence[Play], stage: Stage) -> Iterator[tuple[Play, str]]:
    """Agents in file order, again from the start while there is a duration to fill."""
    for turn in itertools.count() if stage.pace.duration_s is not None else range(1):
        for one in plays:
            yield one, f"{stage.run_id}.{turn}.{one.id}"


async def _lane(queue: Iterator[tuple[Play, str]], stage: Stage) -> None:
    for one, instance in queue:
        if stage.over:
            return
        await AgentRun(stage, one, instance).run()
