"""A service as a process: exit codes, signals, what the supervisor hears, forks."""

import asyncio
import json
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from services.broker import Broker
from services.bus import Delivery
from tests.conftest import Connect

Start = Callable[..., Coroutine[Any, Any, Process]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts the demo service with these `EI_` settings; ends what still runs after the test."""
    processes: list[Process] = []

    async def one(module: str = "tests.integration.demo_service", *arguments: str, **settings: str) -> Process:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("EI_")}
        environ |= {key if key.isupper() else f"EI_{key.upper()}": value for key, value in settings.items()}
        command = [sys.executable, "-W", "error", "-m", module, *arguments]
        process = await asyncio.create_subprocess_exec(*command, env=environ, stderr=PIPE)
        processes.append(process)
        return process

    yield one
    for process in processes:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def logged(process: Process, event: str) -> dict[str, Any]:
    """The next log line of this event."""
    assert process.stderr is not None
    async with asyncio.timeout(20):
        while line := await process.stderr.readline():
            entry: dict[str, Any] = json.loads(line)
            if entry["event"] == event:
                return entry
    raise AssertionError(f"the process ended without {event}")


async def events(process: Process) -> list[str]:
    """The events of all further log lines, until the process has ended."""
    async with asyncio.timeout(20):
        _, text = await process.communicate()
    return [json.loads(line)["event"] for line in text.splitlines()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_and_ends_with_zero(nats_url: str, start: Start, number: signal.Signals) -> None:
    process = await start(nats_url=nats_url)
    await logged(process, "started")
    process.send_signal(number)
    assert await events(process) == ["draining", "demo_stopped", "stopped"]
    assert process.returncode == 0


async def test_a_second_signal_cuts_the_drain_short(nats_url: str, start: Start) -> None:
    process = await start(nats_url=nats_url, drain_takes_s="60", drain_s="60")
    await logged(process, "started")
    process.terminate()
    await logged(process, "draining")
    process.terminate()
    assert await events(process) == ["drain_cut_short", "demo_stopped", "stopped"]
    assert process.returncode == 0


async def test_a_crash_ends_with_one_and_says_why(nats_url: str, start: Start, nats_connect: Connect) -> None:
    process = await start(nats_url=nats_url)
    await logged(process, "started")
    bus = await nats_connect(nats_url)
    await bus.publish("demo.crash", b"")
    crash = await logged(process, "crashed")
    assert "told to crash" in crash["exception"]
    assert await process.wait() == 1


async def test_a_bad_setting_ends_with_two_and_is_named(start: Start) -> None:
    process = await start(drain_s="soon")
    _, text = await process.communicate()
    assert process.returncode == 2
    assert text.decode().startswith("ei-demo: EI_DRAIN_S = 'soon': Expected `float`")


@pytest.mark.parametrize("key", ["nats_nkey", "nats_tls_ca"])
async def test_a_file_that_is_not_there_ends_with_two_and_is_named(start: Start, key: str) -> None:
    process = await start(**{key: "/nowhere/x"})
    entry = await logged(process, "bad_setting")
    assert "/nowhere/x" in entry["error"]
    assert await process.wait() == 2


async def test_waits_for_the_broker_and_says_so(broker: Broker, start: Start) -> None:
    url = broker.start()
    broker.stop()
    process = await start(nats_url=url)
    await logged(process, "broker_error")
    broker.start()
    await logged(process, "started")
    process.terminate()
    assert (await events(process))[-1] == "stopped"
    assert process.returncode == 0


async def test_stops_while_waiting_for_the_broker(broker: Broker, start: Start) -> None:
    url = broker.start()
    broker.stop()
    process = await start(nats_url=url)
    await logged(process, "broker_error")
    process.terminate()
    await events(process)
    assert process.returncode == 0


async def test_tells_its_supervisor(nats_url: str, start: Start, tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(str(path))
        heard.settimeout(20)
        process = await start(nats_url=nats_url, NOTIFY_SOCKET=str(path), WATCHDOG_USEC="100000")
        await logged(process, "started")
        states = {await asyncio.to_thread(heard.recv, 64) for _ in range(4)}
        assert states == {b"READY=1", b"WATCHDOG=1"}
        process.terminate()
        while await asyncio.to_thread(heard.recv, 64) != b"STOPPING=1":
            pass
        await process.communicate()


async def test_runs_in_children_of_a_process_that_imported_it(
    nats_url: str, nats_connect: Connect, start: Start
) -> None:
    """32 services forked from one process all come up; each ends with 0 on SIGTERM."""
    bus = await nats_connect(nats_url)
    came: set[str] = set()
    everybody = asyncio.Event()

    async def on_hello(delivery: Delivery) -> None:
        came.add(delivery.data.decode())
        if len(came) == 32:
            everybody.set()

    await bus.subscribe("demo.hello", on_hello)
    process = await start("tests.integration.fork_services", "32", nats_url=nats_url, log_level="error")
    await asyncio.wait_for(everybody.wait(), 20)
    assert await bus.request("demo.node-31", b"x", 5) == b"x"
    process.terminate()
    assert await events(process) == []
    assert process.returncode == 0
