"""What the router adds to a request, beside sglang-router: `python -m bench.router [--quick] [--json FILE]`.

Two timed engines that take no time serve both: ours over the bus (router, directory, queue of the node, hand-off), and
sglang-router over their HTTP worker API. `added_ms` is a request's time through a router minus the median time of the
same kind of request at the engine's HTTP API itself, asked one after the other in alternating rounds; `req_per_s` is
what 32 clients get through. CPU per request of the router process alone is the figure least disturbed by other load.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from bench.router_client import Endpoint, Prompts, latencies_ms, openai_body, percentile, sglang_body, throughput
from services.cli.cluster.local import LocalCluster, local_cluster
from services.cli.cluster.rundir import run_path

PORT = 18_600
PEER_PORT, PEER_METRICS_PORT = 18_601, 18_602
HOST = "127.0.0.1"
READY_S = 90.0
CLIENTS = 32
PROMPT_TOKENS, ANSWER_TOKENS = 1024, 4
RESULTS = Path(__file__).parent / "results" / "router.json"
NEEDS_PEER = "bench.router needs sglang-router: pip install sglang-router==0.3.2"
ENGINES = [
    *("--engine", "timed", "--nodes", "2"),
    *("--set", "engine.phase=both", "--set", "engine.timed.preset=zero", "--set", "engine.pool_socket="),
]


@dataclass
class Side:
    """One way to the engines, and what was measured on it."""

    name: str
    endpoint: Endpoint
    pid: int
    latency_ms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)

    def cpu_s(self) -> float:
        """CPU of the router's processes so far."""
        try:
            processes = [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            return 0.0
        return sum(sum(process.cpu_times()[:2]) for process in processes)


def engine_ports(port: int) -> list[int]:
    """HTTP ports of the engines of the local cluster on `port`."""
    return [int(file.read_text()) for file in sorted(run_path(port).rglob("engine-*.http"))]


@contextlib.asynccontextmanager
async def peer(workers: list[int], log: Path) -> AsyncIterator[int]:
    """sglang-router in front of the workers, cache-aware; yields its pid once it answers."""
    if importlib.util.find_spec("sglang_router") is None:
        raise SystemExit(NEEDS_PEER)
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", HOST, "--port", str(PEER_PORT)]
    command += ["--worker-urls", *(f"http://{HOST}:{port}" for port in workers), "--policy", "cache_aware"]
    command += ["--prometheus-port", str(PEER_METRICS_PORT), "--prometheus-host", HOST, "--log-level", "warn"]
    environment = os.environ | {"NO_PROXY": HOST}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)  # noqa: ASYNC220 - fork only
    try:
        await _until_it_answers(process, log)
        yield process.pid
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 20)


async def _until_it_answers(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_S
    body = sglang_body([1, 2, 3], 1)
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.post(f"http://{HOST}:{PEER_PORT}/generate", json=body) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.2)
    raise SystemExit(f"sglang-router did not answer within {READY_S} s:\n{_end_of(log)}")


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]


async def measure(cluster: LocalCluster, work: Path, *, quick: bool) -> dict[str, Any]:
    workers = engine_ports(PORT)
    direct = Endpoint(HOST, workers[0], "/generate", sglang_body)
    async with peer(workers, work / "peer.log") as peer_pid:
        router_pid = cluster.state.processes["router"].pid
        ours = Side("ours", Endpoint(HOST, PORT, "/v1/completions", openai_body), router_pid)
        theirs = Side("sglang-router", Endpoint(HOST, PEER_PORT, "/generate", sglang_body), peer_pid)
        prompts, at_engine = Prompts(PROMPT_TOKENS), list[float]()
        for side in (ours, theirs):
            await latencies_ms(side.endpoint, prompts, 20, ANSWER_TOKENS)
        for _ in range(6 if quick else 30):
            at_engine += await latencies_ms(direct, prompts, 20, ANSWER_TOKENS)
            for side in (ours, theirs):
                side.latency_ms += await latencies_ms(side.endpoint, prompts, 20, ANSWER_TOKENS)
        for _ in range(2 if quick else 5):
            for side in (ours, theirs):
                await _load(side, prompts, 3.0 if quick else 6.0)
    return figures(ours, theirs, percentile(at_engine, 50), quick=quick)


async def _load(side: Side, prompts: Prompts, seconds: float) -> None:
    before = side.cpu_s()
    rate = await throughput(side.endpoint, prompts, CLIENTS, seconds, ANSWER_TOKENS)
    side.rates.append(rate)
    side.cpu_ms.append((side.cpu_s() - before) * 1e3 / max(1.0, rate * seconds))


def figures(ours: Side, theirs: Side, engine_ms: float, *, quick: bool) -> dict[str, Any]:
    return {
        "bench": "router",
        "quick": quick,
        "added_ms_p50": percentile(ours.latency_ms, 50) - engine_ms,
        "added_ms_p99": percentile(ours.latency_ms, 99) - engine_ms,
        "req_per_s": percentile(ours.rates, 50),
        "cpu_ms_per_request": percentile(ours.cpu_ms, 50),
        "peer": theirs.name,
        "peer_added_ms_p50": percentile(theirs.latency_ms, 50) - engine_ms,
        "peer_added_ms_p99": percentile(theirs.latency_ms, 99) - engine_ms,
        "peer_req_per_s": percentile(theirs.rates, 50),
        "peer_cpu_ms_per_request": percentile(theirs.cpu_ms, 50),
        "engine_ms_p50": engine_ms,
        "prompt_tokens": PROMPT_TOKENS,
        "answer_tokens": ANSWER_TOKENS,
        "clients": CLIENTS,
        "requests": len(ours.latency_ms),
    }


async def run(work: Path, *, quick: bool) -> dict[str, Any]:
    async with local_cluster(PORT, ENGINES, work / "cluster.log", READY_S) as cluster:
        return await measure(cluster, work, quick=quick)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.router", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="120 requests each and 6 s of load")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as work:
        line = asyncio.run(run(Path(work), quick=options.quick))
    for key, value in line.items():
        print(f"{key:26} {value:.3f}" if isinstance(value, float) else f"{key:26} {value}")
    for target in [options.json] if options.json else [] if options.quick else [RESULTS]:
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(line) + "\n")
    print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
