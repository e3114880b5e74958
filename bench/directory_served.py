"""A match over NATS: a broker, the directory's service and one asker on loopback, requests at random times."""

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import uvloop

from bench.directory_load import Load, contexts
from bench.directory_sides import quietest
from schemas.codec import encode
from schemas.directory import MATCH_REPLY, STATS_REPLY, MatchQuery
from schemas.kv import ChangeType, KvLocation, LocationChange, Tier
from schemas.pool import Empty
from schemas.subjects import Subjects
from services.broker import Broker
from services.bus import BusError, NatsBus

RATE = 2_000.0
HASHES = 1_600
NODES, BLOCKS = 64, 1_000_000
READY_S = 60.0
SUBJECTS = Subjects()


@contextlib.contextmanager
def processes(work: Path) -> Iterator[tuple[str, dict[str, int]]]:
    """A broker and a directory; yields the broker's URL and the pids of all."""
    broker = Broker(work / "broker")
    url = broker.start()
    environ = {key: value for key, value in os.environ.items() if not key.startswith("EI_")}
    environ |= {"EI_NATS_URL": url, "EI_LOG_LEVEL": "error", "EI_NODE_TIMEOUT_S": "3600"}
    directory = subprocess.Popen([sys.executable, "-m", "services.directory"], env=environ)
    try:
        yield url, {"broker": broker.pid, "directory": directory.pid, "asker": os.getpid()}
    finally:
        directory.terminate()
        directory.wait(30)
        broker.kill()


async def fill(bus: NatsBus, load: Load) -> None:
    """Every node reports what it holds."""
    sequences = [0] * load.nodes
    for stored in load.stores:
        sequences[stored.node] += 1
        keys = stored.keys.tobytes()
        change = LocationChange(type=ChangeType.STORED, tier=Tier.L2, parent=stored.parent, hashes=keys)
        name = f"n{stored.node}"
        message = KvLocation(node=name, incarnation=1, seq=sequences[stored.node], changes=[change])
        await bus.publish(SUBJECTS.kv_location(name), encode(message))
    async with asyncio.timeout(READY_S):
        while await copies(bus) != load.blocks:  # noqa: ASYNC110 - another process is waited for
            await asyncio.sleep(0.2)


async def copies(bus: NatsBus) -> int:
    """Block copies the directory knows of."""
    data = await bus.request(SUBJECTS.query_directory("stats"), encode(Empty()), 5.0)
    return sum(STATS_REPLY.decode(data).nodes.values())


async def until_answered(bus: NatsBus) -> None:
    async with asyncio.timeout(READY_S):
        while True:
            with contextlib.suppress(BusError):
                await copies(bus)
                return
            await asyncio.sleep(0.1)


def cpu_s(pids: dict[str, int]) -> dict[str, float]:
    """CPU each process has used."""
    return {name: sum(psutil.Process(pid).cpu_times()[:2]) for name, pid in pids.items()}


async def ask(url: str, pids: dict[str, int], seconds: float) -> dict[str, Any]:
    bus = await NatsBus.connect(url, name="asker", timeout_s=10.0)
    load = contexts(BLOCKS, NODES)
    await until_answered(bus)
    await fill(bus, load)
    rng, took, incomplete, unanswered = random.Random(5), list[tuple[float, float]](), 0, 0
    tail = np.random.default_rng(6).integers(0, 1 << 64, HASHES, np.uint64)
    prompts = [np.concatenate([keys, tail])[:HASHES].tobytes() for keys in load.contexts]
    used = cpu_s(pids)
    loop, subject = asyncio.get_running_loop(), SUBJECTS.query_directory("match")

    async def one(number: int) -> None:
        nonlocal incomplete, unanswered
        agent = number % len(prompts)
        data = encode(MatchQuery(request=f"r{agent}", branch=f"b{agent}", hashes=prompts[agent]))
        began = time.perf_counter()
        try:
            answer = await bus.request(subject, data, 5.0)
        except BusError:
            unanswered += 1
            return
        took.append((began, time.perf_counter() - began))
        incomplete += MATCH_REPLY.decode(answer).blocks < len(load.contexts[0])

    at, end, number = loop.time(), loop.time() + seconds, 0
    tasks = set[asyncio.Task[None]]()
    while at < end:
        at += rng.expovariate(RATE)
        if at > loop.time():
            await asyncio.sleep(at - loop.time())
        task = loop.create_task(one(number))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        number += 1
    await asyncio.gather(*tasks)
    spent = loop.time() - (end - seconds)
    used = {name: after - used[name] for name, after in cpu_s(pids).items()}
    await bus.close()
    if not took:
        raise SystemExit("bench.directory: no match was answered within 5 s")
    first = min(began for began, _ in took)
    each_s: dict[int, list[float]] = {}
    for began, lasted in took:
        each_s.setdefault(int(began - first), []).append(lasted)
    full = [lasted for lasted in each_s.values() if len(lasted) > RATE / 2]
    rounds = full or [[lasted for _, lasted in took]]
    return {
        "requests": len(took),
        "unanswered": unanswered,
        "requests_per_s": len(took) / spent,
        "hashes": HASHES,
        "incomplete": incomplete,
        **{f"{name}_cpu_us_per_request": spent * 1e6 / number for name, spent in used.items()},
        "served_ms_p50": quietest(rounds, 0.5) * 1e3,
        "served_ms_p99": quietest(rounds, 0.99) * 1e3,
        "worst_second_ms_p99": max(sorted(lasted)[len(lasted) * 99 // 100] for lasted in rounds) * 1e3,
    }


def served(seconds: float) -> dict[str, Any]:
    """Poisson arrivals at 2,000 a second, from send to answer; broker, directory and asker share the machine. Quantiles
    are those of the quietest second."""
    with (
        tempfile.TemporaryDirectory() as work,
        processes(Path(work)) as (url, pids),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(ask(url, pids, seconds))
