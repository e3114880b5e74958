"""Orders whose reply takes long, and orders whose reply never comes."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from schemas.codec import encode
from schemas.phase import PlannerQuery, PlannerReply
from schemas.subjects import Subjects
from services.bus import Bus, Delivery, NoResponders
from services.planner_order import OrderLost, order_switch

Connect = Callable[[], Awaitable[Bus]]
SUBJECTS = Subjects()


class Planner:
    """Answers a split when told to; `open_orders` is what its status says."""

    def __init__(self, bus: Bus, open_orders: int) -> None:
        self.bus, self.open_orders, self.looks = bus, open_orders, 0
        self.looked, self.done = asyncio.Event(), asyncio.Event()

    async def start(self) -> None:
        await self.bus.respond(SUBJECTS.query_planner("split"), self._split)
        await self.bus.respond(SUBJECTS.query_planner("status"), self._status)

    async def _split(self, delivery: Delivery) -> bytes:
        await self.done.wait()
        return encode(PlannerReply(ok=True, split_now="1P2D"))

    async def _status(self, delivery: Delivery) -> bytes:
        self.looks += 1
        if self.looks == 5:
            self.looked.set()
        return encode(PlannerReply(ok=True, open_orders=self.open_orders))


async def order(bus: Bus) -> PlannerReply:
    async with asyncio.timeout(10):
        return await order_switch(bus, SUBJECTS, "split", PlannerQuery(split="1P2D"), 60.0, look_every_s=0.01)


async def test_an_order_waits_while_the_planner_works_on_it(connect: Connect) -> None:
    planner = Planner(await connect(), open_orders=1)
    await planner.start()
    ordered = asyncio.ensure_future(order(await connect()))
    await asyncio.wait_for(planner.looked.wait(), 10)
    assert not ordered.done()
    planner.done.set()
    assert (await ordered).split_now == "1P2D"


async def test_an_order_that_a_restarted_planner_does_not_know_is_lost(connect: Connect) -> None:
    planner = Planner(await connect(), open_orders=0)
    await planner.start()
    with pytest.raises(OrderLost, match="lost the order"):
        await order(await connect())
    planner.done.set()


async def test_an_order_without_a_planner_says_so(connect: Connect) -> None:
    with pytest.raises(NoResponders):
        await order(await connect())
