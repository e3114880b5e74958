"""Many timed nodes in one process: `python -m bench.streams_nodes NODES`, with `EI_NATS_URL` naming the broker.

Each node is the product's engine service with a connection of its own; only the process is shared, so that a machine
of two cores can play a cluster.
"""

import asyncio
import gc
import os
import sys

import uvloop

from schemas.phase import Phase
from services.app import serve
from services.engine.__main__ import build
from services.engine.settings import EngineSettings
from services.engine.timed.settings import TimedSettings

LAPTOP_ITERATION_S = 0.0125
"""What the preset takes for an iteration of 31 running requests; `speed` brings it to one token period."""
MAX_RUNNING = 64
SETTLED_S = 2.0


def settings(number: int, url: str, tokens_per_s: float) -> EngineSettings:
    """One node that serves both phases, without host memory."""
    speed = LAPTOP_ITERATION_S * tokens_per_s
    timed = TimedSettings(preset="laptop", speed=speed, max_running=MAX_RUNNING)
    return EngineSettings(node=f"node-{number}", nats_url=url, phase=Phase.BOTH, timed=timed, log_level="warning")


async def main(nodes: int, tokens_per_s: float) -> None:
    stop, url = asyncio.Event(), os.environ["EI_NATS_URL"]
    async with asyncio.TaskGroup() as tasks:
        for number in range(nodes):
            tasks.create_task(serve(build, settings(number, url, tokens_per_s), stop=stop))
        await asyncio.sleep(SETTLED_S)
        gc.freeze()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(int(sys.argv[1]), float(sys.argv[2])))
