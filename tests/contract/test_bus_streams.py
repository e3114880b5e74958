"""Durable messages, in memory and over a real broker: stored once, read in order, from where the reader says."""

import asyncio

import pytest

from services.bus import Bus, BusError, Delivery, Start
from tests.contract.test_bus import Collector, Connect


async def filled(bus: Bus) -> None:
    await bus.ensure_stream("events", ["ev.*"])
    for number, subject in enumerate(["ev.a", "ev.b", "ev.a", "ev.c", "ev.b"], start=1):
        assert await bus.store(subject, b"%d" % number, f"id-{number}") == number


async def test_stored_once_per_message_id(bus: Bus) -> None:
    await bus.ensure_stream("events", ["ev.*"])
    came = Collector()
    first = await bus.store("ev.a", b"x", "same", {"content-type": "application/json"})
    again = await bus.store("ev.a", b"x", "same")
    other = await bus.store("ev.a", b"y", "other")
    assert (first, again, other) == (1, 1, 2)
    await bus.follow("ev.*", came, start="all")
    assert await came.wait_for(2) == [b"x", b"y"]
    assert came.deliveries[0].headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ("all", [1, 2, 3, 4, 5]),
        ("last_per_subject", [3, 4, 5]),
        ("new", []),
        (4, [4, 5]),
        (0, [1, 2, 3, 4, 5]),
        (6, []),
    ],
)
async def test_follow_begins_where_asked(bus: Bus, start: Start, expected: list[int]) -> None:
    await filled(bus)
    came = Collector()
    await bus.follow("ev.*", came, start=start)
    await bus.store("ev.d", b"6", "id-6")
    data = await came.wait_for(len(expected) + 1)
    assert data == [b"%d" % number for number in [*expected, 6]]
    assert [d.sequence for d in came.deliveries] == [*expected, 6]


async def test_follow_one_subject_of_a_stream(bus: Bus) -> None:
    await filled(bus)
    came = Collector()
    await bus.follow("ev.b", came, start="all")
    assert await came.wait_for(2) == [b"2", b"5"]


async def test_last_per_subject_keeps_the_newest_only(bus: Bus) -> None:
    await bus.ensure_stream("commands", ["cmd.*"], last_per_subject=True)
    for number in range(1, 6):
        await bus.store(f"cmd.{number % 2}", b"%d" % number, f"id-{number}")
    came = Collector()
    await bus.follow("cmd.*", came, start="all")
    assert await came.wait_for(2) == [b"4", b"5"]


async def test_ensuring_a_stream_again_changes_it(bus: Bus) -> None:
    await bus.ensure_stream("events", ["ev.*"])
    await bus.ensure_stream("events", ["ev.*"])
    await bus.store("ev.a", b"1", "id-1")
    await bus.ensure_stream("events", ["ev.*", "more.*"], max_age_s=3600)
    assert await bus.store("more.a", b"2", "id-2") == 2


async def test_no_stream_takes_the_subject(bus: Bus) -> None:
    with pytest.raises(BusError, match="nowhere"):
        await bus.store("nowhere", b"", "id")
    with pytest.raises(BusError, match="nowhere"):
        await bus.follow("nowhere", Collector(), start="all")


async def test_case_51_acknowledged_only_after_the_handler_returned(connect: Connect) -> None:
    """A durable reader that dies in its handler gets that message again, before any newer one."""
    first, second = await connect(), await connect()
    await filled(first)
    before, stuck = Collector(), asyncio.Event()

    async def handler(delivery: Delivery) -> None:
        if delivery.data == b"3":
            stuck.set()
            await asyncio.Event().wait()
        await before(delivery)

    subscription = await first.follow("ev.*", handler, start="all", durable="reader")
    await asyncio.wait_for(stuck.wait(), 5)
    assert before.data == [b"1", b"2"]
    await subscription.unsubscribe()
    after = Collector()
    await second.follow("ev.*", after, start="all", durable="reader")
    assert await after.wait_for(3, 15) == [b"3", b"4", b"5"]


async def test_a_durable_reader_goes_on_where_it_ended(connect: Connect) -> None:
    one, two = await connect(), await connect()
    await filled(one)
    came = Collector()
    subscription = await one.follow("ev.*", came, start="all", durable="reader")
    await came.wait_for(5)
    await asyncio.sleep(0.05)
    await subscription.unsubscribe()
    await one.store("ev.a", b"6", "id-6")
    later = Collector()
    await two.follow("ev.*", later, start="all", durable="reader")
    assert await later.wait_for(1) == [b"6"]


async def test_many_messages_come_in_order(connect: Connect) -> None:
    writer, reader = await connect(), await connect()
    await writer.ensure_stream("events", ["ev.*"])
    came = Collector()
    await reader.follow("ev.*", came, start="all")
    for first in range(0, 2000, 200):
        await asyncio.gather(*(writer.store("ev.a", b"%d" % n, f"id-{n}") for n in range(first, first + 200)))
    await came.wait_for(2000, 20)
    assert [d.sequence for d in came.deliveries] == list(range(1, 2001))
