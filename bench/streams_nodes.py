"""Many timed nodes in one process: `python -m bench.streams_nodes NODES`, with `EI_NATS_URL` naming the broker.

Each node is the product's engine service with a connection of its own; only the process is shared, so that a machine
of two cores can play a cluster. Collections are rare, because one here would walk what 32 processes hold.
"""

import asyncio
import gc
import os
import sys

import uvloop

from schemas.phase import Phase
from services.app import serve
from services.engine.__main__ import build
from services.engine.core.timing import PRESETS, Coefficients, Preset
from services.engine.settings import EngineSettings
from services.engine.timed.settings import TimedSettings

MAX_RUNNING = 64
CONTEXT_TOKENS = 4096
SETTLED_S = 2.0
PRESET = "streams"
"""An engine whose iterations take one token period, however many requests run and however long they are."""


def settings(number: int, url: str) -> EngineSettings:
    """One node that serves both phases, without host memory. Its tokens are letters."""
    timed = TimedSettings(
        preset=PRESET,
        l1_tokens=MAX_RUNNING * CONTEXT_TOKENS,
        max_context_tokens=CONTEXT_TOKENS,
        max_running=MAX_RUNNING,
        lowest_token=ord("a"),
        highest_token=ord("z"),
    )
    return EngineSettings(node=f"node-{number}", nats_url=url, phase=Phase.BOTH, timed=timed, log_level="warning")


async def main(nodes: int, tokens_per_s: float) -> None:
    PRESETS[PRESET] = Preset(Coefficients(c0=0.001, d0=1 / tokens_per_s))
    stop, url = asyncio.Event(), os.environ["EI_NATS_URL"]
    async with asyncio.TaskGroup() as tasks:
        for number in range(nodes):
            tasks.create_task(serve(build, settings(number, url), stop=stop))
        await asyncio.sleep(SETTLED_S)
        gc.freeze()
        gc.set_threshold(100_000, 50, 50)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(int(sys.argv[1]), float(sys.argv[2])))
