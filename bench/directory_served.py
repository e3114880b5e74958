"""A match over NATS: a broker, the directory's service and one asker on loopback, requests at random times."""

import asyncio
import contextlib
import gc
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
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
from services.bus import BusError, Delivery, NatsBus

RATE = 2_000.0
HASHES = 1_600
NODES, BLOCKS = 64, 1_000_000
READY_S = 60.0
SUBJECTS = Subjects()
ECHO = "bench.echo"
REPLY_BYTES = 3_300
"""About what a match that names 64 nodes takes."""
ECHO_READY_S = 2.0


@dataclass
class Asked:
    """When each answered question was asked and how long the answer took, in seconds."""

    took: list[tuple[float, float]] = field(default_factory=list)
    answers: list[bytes] = field(default_factory=list)
    unanswered: int = 0
    spent_s: float = 0.0

    def seconds(self) -> list[list[float]]:
        """How long answers took, by the second in which they were asked; seconds of which much is missing are not."""
        first = min(began for began, _ in self.took)
        each: dict[int, list[float]] = {}
        for began, lasted in self.took:
            each.setdefault(int(began - first), []).append(lasted)
        full = [lasted for lasted in each.values() if len(lasted) > RATE / 2]
        return full or [[lasted for _, lasted in self.took]]


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


@contextlib.contextmanager
def echo(url: str) -> Iterator[int]:
    """A service of the same bus and loop that answers as many bytes without a thought; its pid."""
    process = subprocess.Popen([sys.executable, "-m", "bench.directory_served", url])
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait(30)


async def answer_nothing(url: str) -> None:
    bus = await NatsBus.connect(url, name="echo", timeout_s=10.0)

    async def same(_: Delivery) -> bytes:
        return b"x" * REPLY_BYTES

    await bus.respond(ECHO, same, limit=1)
    await asyncio.Event().wait()


async def drive(bus: NatsBus, subject: str, questions: list[bytes], seconds: float) -> Asked:
    """Ask at random times, RATE a second, whatever is still under way."""
    rng, asked = random.Random(5), Asked()
    loop = asyncio.get_running_loop()

    async def one(data: bytes) -> None:
        began = time.perf_counter()
        try:
            answer = await bus.request(subject, data, 5.0)
        except BusError:
            asked.unanswered += 1
            return
        asked.took.append((began, time.perf_counter() - began))
        asked.answers.append(answer)

    began = at = loop.time()
    tasks = set[asyncio.Task[None]]()
    for number in count():
        at += rng.expovariate(RATE)
        if at > began + seconds:
            break
        if at > loop.time():
            await asyncio.sleep(at - loop.time())
        task = loop.create_task(one(questions[number % len(questions)]))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    asked.spent_s = loop.time() - began
    if not asked.took:
        raise SystemExit("bench.directory: no question was answered within 5 s")
    return asked


async def ask(url: str, pids: dict[str, int], seconds: float) -> dict[str, Any]:
    bus = await NatsBus.connect(url, name="asker", timeout_s=10.0)
    load = contexts(BLOCKS, NODES)
    await until_answered(bus)
    await fill(bus, load)
    tail = np.random.default_rng(6).integers(0, 1 << 64, HASHES, np.uint64)
    prompts = [np.concatenate([keys, tail])[:HASHES].tobytes() for keys in load.contexts]
    questions = [
        encode(MatchQuery(request=f"r{agent}", branch=f"b{agent}", hashes=keys)) for agent, keys in enumerate(prompts)
    ]
    gc.collect()
    gc.freeze()
    used = cpu_s(pids)
    asked = await drive(bus, SUBJECTS.query_directory("match"), questions, seconds)
    used = {name: after - used[name] for name, after in cpu_s(pids).items()}
    with echo(url) as pid:
        await asyncio.sleep(ECHO_READY_S)
        before = cpu_s({"echo": pid})["echo"]
        echoed = await drive(bus, ECHO, questions, seconds / 2)
        used["echo"] = (cpu_s({"echo": pid})["echo"] - before) * len(asked.took) / len(echoed.took)
    await bus.close()
    blocks = len(load.contexts[0])
    return {
        "requests": len(asked.took),
        "unanswered": asked.unanswered,
        "requests_per_s": len(asked.took) / asked.spent_s,
        "hashes": HASHES,
        "reply_bytes": max(map(len, asked.answers)),
        "incomplete": sum(MATCH_REPLY.decode(answer).blocks < blocks for answer in asked.answers),
        **{f"{name}_cpu_us_per_request": spent * 1e6 / len(asked.took) for name, spent in used.items()},
        "served_ms_p50": quietest(asked.seconds(), 0.5) * 1e3,
        "served_ms_p99": quietest(asked.seconds(), 0.99) * 1e3,
        "worst_second_ms_p99": max(sorted(lasted)[len(lasted) * 99 // 100] for lasted in asked.seconds()) * 1e3,
        "echo_ms_p50": quietest(echoed.seconds(), 0.5) * 1e3,
        "echo_ms_p99": quietest(echoed.seconds(), 0.99) * 1e3,
    }


def served(seconds: float) -> dict[str, Any]:
    """Poisson arrivals at 2,000 a second, from send to answer; broker, directory and asker share the machine. Quantiles
    are those of the quietest second. `echo` is the same with a service in the directory's place that does nothing."""
    with (
        tempfile.TemporaryDirectory() as work,
        processes(Path(work)) as (url, pids),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(ask(url, pids, seconds))


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as echoing:
        echoing.run(answer_nothing(sys.argv[1]))
