"""A thousand streams through one router: `python -m bench.streams [--quick] [--json FILE]`.

Timed nodes that serve both phases answer 20 tokens a second and stream, one message per iteration with the tokens of
all its requests; they share one process (`bench.streams_nodes`); broker, router, directory and clients have one each.
`added_ms` is the time from the engine's publish (the message's own `t`, read off the bus by the
bench) to the moment the client's socket has the token; `rss_growth_pct` is how much larger the router's memory is at
the end than a minute (quick: a third of the run) after the last stream began; `stalls` counts gaps of a stream above a
second, `short` streams that did not get all their tokens. The nodes have no host memory here: what is measured is the
way of a token.
"""

import argparse
import asyncio
import contextlib
import functools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import aiohttp
import msgspec
import numpy as np
import psutil
import uvloop

from schemas.serve import REPLY_BATCH
from schemas.subjects import Subjects
from services.broker import Broker
from services.bus import Bus, Delivery, NatsBus

PORT = 18_700
HOST = "127.0.0.1"
NODES = 32
STREAMS = 1000
TOKENS_PER_S = 20
READY_S = 120.0
STALL_S = 1.0
LATE_S = 30.0
"""So much longer than planned a run may take before streams that still run count as short."""
PROMPT_TOKENS = 64
SAMPLED = 10
"""Every so many-th stream is followed token by token."""
RESULTS = Path(__file__).parent / "results" / "streams.json"
SUBJECTS = Subjects()


class _Choice(msgspec.Struct):
    text: str = ""


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []


_CHUNK = msgspec.json.Decoder(_Chunk)


class Stream(asyncio.Protocol):
    """One client: sends its request, notes when each token is on its socket."""

    def __init__(self, number: int, tokens: int, seen: "Seen") -> None:
        self.number, self.tokens, self._seen = number, tokens, seen
        self.request_id = f"s{number}"
        self.count = 0
        self.last_s = 0.0
        self.arrived: list[float] = []
        self._rest = b""
        self._body = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        prompt = random.Random(self.number).choices(range(32, 127), k=PROMPT_TOKENS)
        body = json.dumps({"prompt": prompt, "max_tokens": self.tokens, "ignore_eos": True, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: {self.request_id}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(head.encode() + body)

    def data_received(self, data: bytes) -> None:
        now = time.time()
        if not self._body:
            head, found, data = (self._rest + data).partition(b"\r\n\r\n")
            if not found:
                self._rest = head
                return
            if not head.startswith(b"HTTP/1.1 200"):
                self.ended.set_exception(RuntimeError(f"{head[:60]!r} {data[:300]!r}"))
                self._transport.abort()
                return
            self._body, self._rest = True, b""
        self._take(self._rest + data, now)

    def _take(self, data: bytes, now: float) -> None:
        *events, self._rest = data.split(b"\n\n")
        for event in events:
            start = event.find(b"data: ")
            if start < 0:
                continue
            if event.startswith(b"[DONE]", start + 6):
                self._transport.close()
                return
            tokens = sum(len(choice.text) for choice in _CHUNK.decode(event[start + 6 :]).choices)
            if tokens:
                self._seen.gap(now - self.last_s if self.last_s else 0.0)
                self.last_s = now
                self.count += tokens
                if self.number % SAMPLED == 0:
                    self.arrived += [now] * tokens

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


@dataclass
class Seen:
    """What the bench saw: stalls, and per followed stream when each token was published."""

    stalls: int = 0
    longest_gap_s: float = 0.0
    published: dict[str, dict[int, float]] = field(default_factory=dict)

    def gap(self, seconds: float) -> None:
        self.longest_gap_s = max(self.longest_gap_s, seconds)
        self.stalls += seconds > STALL_S

    async def on_reply(self, delivery: Delivery) -> None:
        batch = REPLY_BATCH.decode(delivery.data)
        for update in batch.updates:
            times = self.published.get(update.id.rpartition("-")[0])
            if times is not None and update.tokens:
                for index in range(update.seq, update.seq + len(update.tokens) // 4):
                    times.setdefault(index, batch.t)


@dataclass
class Memory:
    """The router's resident memory over time: (seconds since the start, bytes)."""

    process: psutil.Process
    points: list[tuple[float, int]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    async def watch(self) -> None:
        while True:
            self.points.append((time.monotonic() - self.began, self.process.memory_info().rss))
            await asyncio.sleep(1.0)

    def growth_pct(self, settled_s: float) -> float | None:
        later = [rss for at, rss in self.points if at >= settled_s]
        return 100.0 * (later[-1] - later[0]) / later[0] if later else None


async def drive(bus: Bus, processes: dict[str, psutil.Process], streams: int, seconds: float) -> dict[str, Any]:
    """Open the streams over some seconds, keep them for `seconds`, take everything in."""
    seen = Seen()
    loop = asyncio.get_running_loop()
    tokens = round(seconds * TOKENS_PER_S)
    memory = Memory(processes["router"])
    async with asyncio.TaskGroup() as tasks:
        await bus.subscribe(SUBJECTS.reply(SUBJECTS.ANY), seen.on_reply)
        opened: list[Stream] = []
        for number in range(streams):
            if number % SAMPLED == 0:
                seen.published[f"s{number}"] = {}
            _, stream = await loop.create_connection(functools.partial(Stream, number, tokens, seen), HOST, PORT)
            opened.append(stream)
            if number % 20 == 19:
                await asyncio.sleep(0.1)
        watching = tasks.create_task(memory.watch())
        began, cpu, before = time.monotonic(), _cpu_s(processes), sum(stream.count for stream in opened)
        await asyncio.sleep(max(1.0, seconds - streams / 200 - 5.0))
        took, used = time.monotonic() - began, _cpu_s(processes)
        tokens_then = sum(stream.count for stream in opened) - before
        await asyncio.wait([stream.ended for stream in opened], timeout=seconds + LATE_S)
        watching.cancel()
    added = [
        1e3 * (at - seen.published[stream.request_id][index])
        for stream in opened
        if stream.number % SAMPLED == 0
        for index, at in enumerate(stream.arrived)
        if index in seen.published[stream.request_id]
    ]
    return {
        "streams": streams,
        "added_ms_p50": _percentile(added, 50),
        "added_ms_p99": _percentile(added, 99),
        "rss_growth_pct": memory.growth_pct(60.0 if seconds > 180 else seconds / 3),
        "stalls": seen.stalls,
        "longest_gap_s": seen.longest_gap_s,
        "short": sum(stream.count != tokens for stream in opened),
        "tokens_per_s": sum(stream.count for stream in opened) / seconds,
        "followed_tokens": len(added),
        "cpu_share": {name: (used[name] - cpu[name]) / took for name in used},
        "router_cpu_us_per_token": 1e6 * (used["router"] - cpu["router"]) / max(1, tokens_then),
        "rss_mb": memory.points[-1][1] / 1e6,
        "seconds": seconds,
    }


def _cpu_s(processes: dict[str, psutil.Process]) -> dict[str, float]:
    return {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}


def _percentile(values: list[float], share: float) -> float | None:
    return float(np.percentile(values, share)) if values else None


@contextlib.contextmanager
def processes(work: Path) -> Iterator[tuple[str, dict[str, psutil.Process]]]:
    """The broker's URL; broker, directory, router, nodes and this one by name."""
    broker = Broker(work / "broker")
    url = broker.start()
    environ = {key: value for key, value in os.environ.items() if not key.startswith("EI_")}
    environ |= {"EI_NATS_URL": url, "EI_LOG_LEVEL": "warning", "EI_HTTP_PORT": str(PORT)}
    commands = (
        ("router", ["services.router"]),
        ("nodes", ["bench.streams_nodes", str(NODES), str(TOKENS_PER_S)]),
        ("directory", ["services.directory"]),
    )
    started = dict[str, subprocess.Popen[bytes]]()
    try:
        for name, command in commands:
            started[name] = subprocess.Popen([sys.executable, "-m", *command], env=environ)
            environ.pop("EI_HTTP_PORT", None)
        pids = {name: process.pid for name, process in started.items()} | {"broker": broker.pid, "clients": os.getpid()}
        yield url, {name: psutil.Process(pid) for name, pid in pids.items()}
    finally:
        for process in started.values():
            process.terminate()
        for process in started.values():
            process.wait(READY_S)
        broker.kill()


async def until_ready(bus: Bus) -> None:
    """All nodes are heard, and the router takes requests."""
    heard = set[str]()

    async def on_node(delivery: Delivery) -> None:
        heard.add(delivery.subject)

    await bus.subscribe(SUBJECTS.telemetry_node(SUBJECTS.ANY), on_node)
    async with asyncio.timeout(READY_S), aiohttp.ClientSession(f"http://{HOST}:{PORT}") as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get("/ready") as response:
                    if response.status == 200 and len(heard) == NODES:
                        return
            await asyncio.sleep(0.2)


async def measure(work: Path, streams: int, seconds: float) -> dict[str, Any]:
    with processes(work) as (url, found):
        bus = await NatsBus.connect(url, name="clients", timeout_s=READY_S)
        await until_ready(bus)
        figures = await drive(bus, found, streams, seconds)
        await bus.close()
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.streams", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="200 streams for 15 s")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    streams, seconds = (200, 15.0) if options.quick else (STREAMS, 600.0)
    with tempfile.TemporaryDirectory() as work, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        line = {"bench": "streams", "quick": options.quick} | runner.run(measure(Path(work), streams, seconds))
    for key, value in line.items():
        print(f"{key:18} {value:.3f}" if isinstance(value, float) else f"{key:18} {value}")
    for target in [options.json] if options.json else [] if options.quick else [RESULTS]:
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(line) + "\n")
    print(json.dumps(line))
    return 1 if line["short"] or line["stalls"] else 0


if __name__ == "__main__":
    sys.exit(main())
