"""`ei up` as a user meets it: it serves, restarts what dies, sweeps what was killed, and leaves nothing."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.broker import Broker
from services.cli.cluster.process import start_time
from tests.cluster import EI, Cluster, free_port, leftovers

PROMPT = list(range(40, 140))


def up(port: int, *arguments: str, output: Path) -> "subprocess.Popen[bytes]":
    with output.open("wb") as file:
        return subprocess.Popen(
            [*EI, "up", "--engine", "timed", "--port", str(port), *arguments], stdout=file, stderr=file
        )


def until_ready(process: "subprocess.Popen[bytes]", output: Path, limit_s: float = 90) -> None:
    deadline = time.monotonic() + limit_s
    while "ready after" not in output.read_text():
        assert process.poll() is None, output.read_text()
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.05)


@pytest.mark.timeout(240)
def test_the_next_run_sweeps_what_a_killed_one_left(tmp_path: Path) -> None:
    port, output = free_port(), tmp_path / "first.txt"
    first = up(port, "--nodes", "2", output=output)
    until_ready(first, output)
    state = json.loads((Path(f"/tmp/ei-{os.getuid()}-{port}") / "cluster.json").read_text())
    first.kill()
    first.wait()
    assert any("arena" in found for found in leftovers(port)), "shared memory outlives a killed cluster"
    second_output = tmp_path / "second.txt"
    second = up(port, "--nodes", "2", output=second_output)
    until_ready(second, second_output)
    assert f"swept /dev/shm/ei-{os.getuid()}-{port}-node-0.arena of a run that was killed" in second_output.read_text()
    assert all(start_time(process["pid"]) is None for process in state["processes"].values())
    second.send_signal(signal.SIGTERM)
    assert second.wait(60) == 0
    assert leftovers(port) == []


@pytest.mark.timeout(240)
async def test_every_service_that_is_killed_comes_back(tmp_path: Path) -> None:
    async with Cluster.up("--engine", "timed", "--nodes", "2", ready_s=90) as cluster:
        before = await cluster.complete(PROMPT, 8)
        for name in ("planner", "directory", "kvpool-node-0", "engine-node-1", "router"):
            old = cluster.kill(name)
            async with asyncio.timeout(30):
                while cluster.state()["processes"].get(name, {"pid": old})["pid"] == old:
                    await asyncio.sleep(0.05)
        async with asyncio.timeout(60):
            while True:
                try:
                    again = await cluster.complete(PROMPT, 8)
                    break
                except Exception:  # noqa: BLE001 - refused in many ways while services come back
                    await asyncio.sleep(0.2)
        assert again.output == before.output
        assert "split 1P1D" in await cluster.command("status")


@pytest.mark.timeout(240)
async def test_orders_from_the_command_line(tmp_path: Path) -> None:
    async with Cluster.up("--engine", "timed", "--nodes", "3", ready_s=90) as cluster:
        ordered = await cluster.command("split", "1P2D")
        assert "split 1P2D: the switch took" in ordered
        assert "lost: 0 tokens of KV reuse, 0 requests failed" in ordered
        assert sorted((await cluster.phases()).values()) == ["decode", "decode", "prefill"]
        assert "pinned: node-2" in await cluster.command("pin", "node-2")
        assert "pinned: none" in await cluster.command("unpin", "node-2")
        status = json.loads(await cluster.command("status", "--json", "--branches"))
        assert status["cluster"]["split"] == "1P2D"
        assert status["branches"] == []
        shown = await cluster.command("tail", "telemetry.node", "--count", "2", "--node", "node-1")
        assert [line.split()[0] for line in shown.splitlines()] == ["ei.p0.telemetry.node.node-1"] * 2
        refused = await asyncio.create_subprocess_exec(
            *EI, "split", "0P3D", "--port", str(cluster.port), stderr=asyncio.subprocess.PIPE
        )
        _, error = await refused.communicate()
        assert refused.returncode == 1
        assert b"split 0P3D leaves a phase without a node; each needs at least 1 (now 1P2D)" in error


@pytest.mark.timeout(240)
def test_a_second_cluster_on_the_same_port_is_refused_and_the_first_lives(tmp_path: Path) -> None:
    port, output = free_port(), tmp_path / "first.txt"
    first = up(port, "--nodes", "1", output=output)
    until_ready(first, output)
    second = subprocess.run(
        [*EI, "up", "--engine", "timed", "--port", str(port)], capture_output=True, text=True, check=False
    )
    assert second.returncode == 1
    assert f"process {first.pid} runs a cluster in" in second.stdout
    first.send_signal(signal.SIGINT)
    assert first.wait(60) == 0
    assert leftovers(port) == []


@pytest.mark.timeout(240)
async def test_a_running_broker_is_used_when_it_is_named(broker: Broker) -> None:
    async with Cluster.up("--engine", "timed", "--nodes", "1", "--nats", broker.start(), ready_s=90) as cluster:
        assert "broker" not in cluster.state()["processes"]
        assert len((await cluster.complete(PROMPT, 4)).output) == 4
        assert await cluster.phases() == {"node-0": "both"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--split", "2P2D"], "split 2P2D is not one of 3 nodes"),
        (["--set", "engine.no_such=1"], "unknown setting no_such"),
        (["--set", "nobody.x=1"], "no service 'nobody'"),
    ],
)
@pytest.mark.timeout(120)
def test_what_cannot_start_says_why_and_leaves_nothing(arguments: list[str], text: str) -> None:
    port = free_port()
    ended = subprocess.run(
        [*EI, "up", "--engine", "timed", "--port", str(port), *arguments], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert text in ended.stdout
    assert leftovers(port) == []


def test_the_command_line_starts_quickly_without_the_services() -> None:
    code = "import services.cli.main, sys; print(sorted({'numpy', 'uvicorn', 'aiohttp', 'torch'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
