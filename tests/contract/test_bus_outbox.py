"""The outbox: nothing is lost while the broker is away, order within a subject stays."""

import asyncio

import pytest

from services.broker import Broker
from services.bus import MemoryBus, MemoryHub, Outbox
from services.clock import SystemClock
from services.observe import RateLimitedLog, logger
from tests.conftest import Connect
from tests.contract.test_bus import Collector

LOG = RateLimitedLog(logger("test"), SystemClock())


@pytest.fixture
def hub() -> MemoryHub:
    return MemoryHub()


async def test_messages_put_during_an_outage_are_stored_after_it(broker: Broker, nats_connect: Connect) -> None:
    bus = await nats_connect(broker.start())
    await bus.ensure_stream("events", ["ev.*"])
    outbox = Outbox(bus, LOG)
    running = asyncio.ensure_future(outbox.run())
    for number in range(20):
        outbox.put(f"ev.{number % 3}", b"%d" % number, f"id-{number}")
    await asyncio.wait_for(outbox.join(), 10)
    broker.kill()
    for number in range(20, 40):
        outbox.put(f"ev.{number % 3}", b"%d" % number, f"id-{number}")
    broker.start()
    await asyncio.wait_for(outbox.join(), 20)
    assert (len(outbox), outbox.dropped) == (0, 0)
    came = Collector()
    await bus.follow("ev.*", came, start="all")
    await came.wait_for(40, 10)
    for subject in range(3):
        own = [int(d.data) for d in came.deliveries if d.subject == f"ev.{subject}"]
        assert own == list(range(subject, 40, 3))
    running.cancel()


async def test_a_full_outbox_refuses_and_counts(hub: MemoryHub) -> None:
    bus = MemoryBus(hub)
    outbox = Outbox(bus, LOG, limit=2)
    assert [outbox.put("ev.a", b"", str(number)) for number in range(4)] == [True, True, False, False]
    assert (len(outbox), outbox.dropped) == (2, 2)
    await bus.close()


async def test_what_can_never_be_stored_does_not_hold_up_the_rest(hub: MemoryHub) -> None:
    bus = MemoryBus(hub)
    await bus.ensure_stream("events", ["ev.*"])
    outbox = Outbox(bus, LOG)
    running = asyncio.ensure_future(outbox.run())
    outbox.put("ev.a", bytes(bus.max_payload_bytes + 1), "big")
    outbox.put("ev.a", b"small", "small")
    await asyncio.wait_for(outbox.join(), 5)
    assert [m.data for m in hub.streams["events"].messages] == [b"small"]
    assert outbox.dropped == 1
    running.cancel()
    await bus.close()
