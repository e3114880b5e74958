"""`ei-engine` as a process, beside a real pool process: start, serve, kill -9, start again, SIGTERM."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from schemas.kv import NODE_HELLO, NodeHello
from services.bus import Delivery
from tests.conftest import Connect
from tests.engine_cluster import FakeRouter, S, prompt_of, until

NODE = "node-0"


@asynccontextmanager
async def process(service: str, path: Path, url: str, **settings: object) -> AsyncIterator[asyncio.subprocess.Process]:
    """One service as a process; SIGTERM at the end unless it is gone."""
    config = path / f"{service}.toml"
    values = {"node": NODE, "nats_url": url, "log_level": "warning", **settings}
    config.write_text(
        "".join(
            f"{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}\n"
            for key, value in values.items()
            if not isinstance(value, dict)
        )
        + "".join(
            f"[{key}]\n" + "".join(f"{k} = {v!r}\n" for k, v in value.items())
            for key, value in values.items()
            if isinstance(value, dict)
        )
    )
    child = await asyncio.create_subprocess_exec(sys.executable, "-m", f"services.{service}", "--config", str(config))
    try:
        yield child
    finally:
        if child.returncode is None:
            child.terminate()
        await asyncio.wait_for(child.wait(), 20)


async def test_an_engine_process_is_killed_and_comes_back(nats_url: str, nats_connect: Connect, tmp_path: Path) -> None:
    bus = await nats_connect(nats_url, name="router")
    hellos: list[NodeHello] = []

    async def on_hello(delivery: Delivery) -> None:
        hellos.append(NODE_HELLO.decode(delivery.data))

    await bus.subscribe(S.node_hello(NODE), on_hello)
    socket = str(tmp_path / "pool.sock")
    pool = {"model": "timed", "block_size": 16, "block_bytes": 4096, "capacity_blocks": 512, "socket": socket}
    arena = {"arena": str(tmp_path / "arena"), "transport": "shm"}
    engine = {"engine": "timed", "pool_socket": socket, "timed": {"preset": "laptop", "speed": 4.0}}
    prompt = prompt_of(1, 500)
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        router = FakeRouter(bus)
        beating = tasks.create_task(_beat(router))
        await stack.enter_async_context(process("kvpool", tmp_path, nats_url, **pool, **arena))
        async with process("engine", tmp_path, nats_url, **engine) as first:
            await until(lambda: bool(hellos), 30)
            await router.place("cold", NODE, NODE, prompt, 20)
            answer = await router.answer("cold")
            os.kill(first.pid, signal.SIGKILL)
            await first.wait()
        async with process("engine", tmp_path, nats_url, **engine) as second:
            await until(lambda: len({hello.engine_incarnation for hello in hellos}) == 2, 30)
            assert len({hello.incarnation for hello in hellos}) == 1, "the pool has outlived the engine"
            await router.place("warm", NODE, NODE, prompt, 20)
            assert await router.answer("warm") == answer
            await router.prefill("warm").ended.wait()
            end = router.prefill("warm").end
            assert end is not None
            assert (end.cached_tokens, end.restored_tokens) == (496, 496), "from the arena that the dead one had filled"
            second.terminate()
            assert await asyncio.wait_for(second.wait(), 20) == 0
        beating.cancel()


async def _beat(router: FakeRouter) -> None:
    async with asyncio.TaskGroup() as tasks:
        await router.start(tasks)
