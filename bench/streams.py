"""A thousand streams through one router: `python -m bench.streams [--quick] [--streams N] [--seconds S] [--json FILE]`.

Timed nodes that serve both phases answer 20 tokens a second and stream, one message per iteration with the tokens of
all its requests; they share one process (`bench.streams_nodes`); broker, router, directory and clients
(`bench.streams_clients`) have one each. `added_ms` is the time from the engine's publish (the message's own `t`, read
off the bus by this process) to the moment a client has read the token from its socket, while all streams are open;
`opening_ms_p99` is the same while they are being opened, a hundred a second. CPU is of the time in which all are open.
A stream lasts two minutes at most and is followed by another, so that from then on memory must not grow:
`rss_growth_pct` is how much larger the router's is at the end than 150 s (below five minutes: a third of the run) after
all were open. `stalls` counts waits of a stream above a second, `short` streams that ended without all their
tokens. The nodes have no host memory here: what is measured is the way of a token.
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import psutil
import uvloop

from bench.streams_clients import ANSWER_S, FOLLOWED, HOST, TOKENS_PER_S, Seen
from schemas.subjects import Subjects
from services.broker import Broker
from services.bus import Bus, Delivery, NatsBus

PORT = 18_700
NODES = 32
STREAMS = 1000
READY_S = 120.0
SETTLE_S = 3.0
_MOST_TOKENS = round(ANSWER_S * TOKENS_PER_S)
RESULTS = Path(__file__).parent / "results" / "streams.json"
SUBJECTS = Subjects()


class _Update(msgspec.Struct):
    """What is followed of a `LegUpdate`."""

    id: str
    seq: int = 0
    tokens: bytes = b""


class _Batch(msgspec.Struct):
    """What is followed of a `ReplyBatch`."""

    t: float
    updates: list[_Update]


_BATCH = msgspec.msgpack.Decoder(_Batch)


class Published:
    """By request id: when each token of a followed stream was published (Unix seconds), 0 for never."""

    def __init__(self) -> None:
        self.times: dict[str, array[float]] = {}

    async def on_reply(self, delivery: Delivery) -> None:
        batch = _BATCH.decode(delivery.data)
        for update in batch.updates:
            name = update.id.rpartition("-")[0]
            if update.tokens and int(name[1:]) % FOLLOWED == 0:
                times = self.times.setdefault(name, array("d", bytes(8 * _MOST_TOKENS)))
                for index in range(update.seq, update.seq + len(update.tokens) // 4):
                    times[index] = times[index] or batch.t

    def added_ms(self, seen: Seen) -> tuple[list[float], list[float]]:
        """From publish to socket: of tokens read while all streams were open, and of those read before."""
        steady, opening = list[float](), list[float]()
        for stream, arrived in seen.arrived.items():
            for published, at in zip(self.times.get(stream, ()), arrived, strict=False):
                if published and at < seen.closing_at:
                    (opening if at < seen.opened_at else steady).append(1e3 * (at - published))
        return steady, opening


@dataclass
class Usage:
    """CPU seconds of the processes and the router's memory: (Unix seconds, CPU by name, bytes), twice a second."""

    processes: dict[str, psutil.Process]
    points: list[tuple[float, dict[str, float], int]] = field(default_factory=list)

    async def watch(self) -> None:
        while True:
            used = {name: sum(process.cpu_times()[:2]) for name, process in self.processes.items()}
            self.points.append((time.time(), used, self.processes["router"].memory_info().rss))
            await asyncio.sleep(0.5)

    def between(self, first_s: float, last_s: float) -> list[tuple[float, dict[str, float], int]]:
        return [point for point in self.points if first_s <= point[0] <= last_s]


async def drive(bus: Bus, found: dict[str, psutil.Process], streams: int, seconds: float) -> dict[str, Any]:
    """Let the clients run and follow what the nodes publish."""
    published = Published()
    await bus.subscribe(SUBJECTS.reply(SUBJECTS.ANY), published.on_reply)
    command = [sys.executable, "-m", "bench.streams_clients", str(PORT), str(streams), str(seconds)]
    clients = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, limit=1 << 30)
    usage = Usage(found | {"clients": psutil.Process(clients.pid), "bench": psutil.Process()})
    watching = asyncio.ensure_future(usage.watch())
    assert clients.stdout is not None
    line = await clients.stdout.readline()
    watching.cancel()
    await clients.wait()
    return figures(msgspec.json.decode(line, type=Seen), usage, published, streams, seconds)


def figures(seen: Seen, usage: Usage, published: Published, streams: int, seconds: float) -> dict[str, Any]:
    steady, opening = published.added_ms(seen)
    all_open = usage.between(seen.opened_at + SETTLE_S, seen.closing_at)
    (began_s, cpu, _), (ended_s, used, rss) = all_open[0], all_open[-1]
    settled = usage.between(seen.opened_at + (150.0 if seconds > 300 else seconds / 3), seen.closing_at)
    moments, totals = zip(*seen.counted, strict=True)
    tokens = float(np.interp(ended_s, moments, totals) - np.interp(began_s, moments, totals))
    share = {name: (used[name] - cpu[name]) / (ended_s - began_s) for name in used}
    return {
        "streams": streams,
        "seconds": seconds,
        "added_ms_p50": _percentile(steady, 50),
        "added_ms_p99": _percentile(steady, 99),
        "added_ms_p999": _percentile(steady, 99.9),
        "opening_ms_p99": _percentile(opening, 99),
        "followed_tokens": len(steady),
        "stalls": seen.stalls,
        "longest_gap_s": seen.longest_gap_s,
        "opened": seen.opened,
        "short": seen.short,
        "tokens_per_s": tokens / (ended_s - began_s),
        "cpu_share": share,
        "router_cpu_us_per_token": 1e6 * (used["router"] - cpu["router"]) / tokens,
        "cpu_us_per_token": 1e6 * sum(used[name] - cpu[name] for name in used) / tokens,
        "rss_mb": rss / 1e6,
        "rss_growth_pct": 100.0 * (rss - settled[0][2]) / settled[0][2] if settled else None,
    }


def _percentile(values: list[float], share: float) -> float | None:
    return float(np.percentile(values, share)) if values else None


@contextlib.contextmanager
def processes(work: Path) -> Iterator[tuple[str, dict[str, psutil.Process]]]:
    """The broker's URL; broker, directory, router and nodes by name."""
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
        pids = {name: process.pid for name, process in started.items()} | {"broker": broker.pid}
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

    telemetry = await bus.subscribe(SUBJECTS.telemetry_node(SUBJECTS.ANY), on_node)
    async with asyncio.timeout(READY_S), aiohttp.ClientSession(f"http://{HOST}:{PORT}") as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get("/ready") as response:
                    if response.status == 200 and len(heard) == NODES:
                        break
            await asyncio.sleep(0.2)
    await telemetry.unsubscribe()


async def measure(work: Path, streams: int, seconds: float) -> dict[str, Any]:
    with processes(work) as (url, found):
        bus = await NatsBus.connect(url, name="bench", timeout_s=READY_S)
        await until_ready(bus)
        result = await drive(bus, found, streams, seconds)
        await bus.close()
    return result


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.streams", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="200 streams for 15 s")
    parser.add_argument("--streams", type=int, metavar="N", help=f"how many streams (default {STREAMS})")
    parser.add_argument("--seconds", type=float, metavar="S", help="how long so many are open (default 600)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    streams = options.streams or (200 if options.quick else STREAMS)
    seconds = options.seconds or (15.0 if options.quick else 600.0)
    with tempfile.TemporaryDirectory() as work, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        line = {"bench": "streams", "quick": options.quick} | runner.run(measure(Path(work), streams, seconds))
    for key, value in line.items():
        print(f"{key:24} {value:.3f}" if isinstance(value, float) else f"{key:24} {value}")
    whole = (streams, seconds) == (STREAMS, 600.0)
    for target in [options.json] if options.json else [RESULTS] if whole else []:
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(line) + "\n")
    print(json.dumps(line))
    return 1 if line["short"] or line["stalls"] else 0


if __name__ == "__main__":
    sys.exit(main())
