"""Fixtures for every test: real brokers, and buses on them or in memory; and what a test that hung was waiting for."""

import asyncio
import gc
import io
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from services.broker import Broker
from services.bus import Bus, MemoryBus, MemoryHub, NatsBus

Connect = Callable[..., Awaitable[Bus]]

settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
"""How long an example takes says nothing: other work may run on the machine."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that ran into its time limit reports where each asyncio task stood."""
    report = yield
    if call.excinfo is not None and "from pytest-timeout" in str(call.excinfo.value):
        stacks = io.StringIO()
        for task in (found for found in gc.get_objects() if isinstance(found, asyncio.Task) and not found.done()):
            task.print_stack(file=stacks)
        report.sections.append(("asyncio tasks", stacks.getvalue()))
    return report


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    """A broker of the test's own (50 ms), to kill, freeze, restart and configure; started by the test."""
    broker = Broker(tmp_path / "broker")
    yield broker
    broker.kill()


@pytest.fixture
def nats_url(broker: Broker) -> str:
    """The URL of the test's own running broker, empty, without keys."""
    return broker.start()


@pytest.fixture
async def nats_connect() -> AsyncIterator[Connect]:
    """Opens real connections (`await nats_connect(url, name=...)`) and closes them after the test."""
    opened: list[NatsBus] = []

    async def connect(url: str, **options: Any) -> NatsBus:
        bus = await NatsBus.connect(url, **{"name": "test", "timeout_s": 10.0, **options})
        opened.append(bus)
        return bus

    yield connect
    await asyncio.gather(*(bus.close() for bus in opened))


@pytest.fixture(params=["memory", "nats"])
async def connect(request: pytest.FixtureRequest, nats_connect: Connect) -> AsyncIterator[Connect]:
    """Opens buses (`await connect()`) to one broker, in memory and real; a failed handler fails the test."""
    opened: list[MemoryBus | NatsBus] = []
    hub = MemoryHub()
    url = request.getfixturevalue("nats_url") if request.param == "nats" else ""

    async def one() -> Bus:
        bus = await NatsBus.connect(url, name="test", timeout_s=10) if url else MemoryBus(hub)
        opened.append(bus)
        return bus

    yield one
    for bus in opened:
        await bus.close()
    failures = [bus.failure for bus in opened if bus.failure is not None]
    if failures:
        raise failures[0]


@pytest.fixture
async def bus(connect: Connect) -> Bus:
    """One bus, in memory and real."""
    return await connect()
