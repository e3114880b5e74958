"""An order to the planner lasts as long as a switch: asked once, given up when its reply can no longer come."""

import asyncio

from schemas.codec import RejectedMessage, encode
from schemas.phase import PLANNER_REPLY, PlannerQuery, PlannerReply
from schemas.subjects import Subjects
from services.bus import Bus, BusError, NoResponders

_LOOK_EVERY_S = 1.0
_STATUS_S = 5.0
_LOST_AFTER = 2
"""Looks in a row that found no planner at work on an order: one may fall between the end of it and its reply."""


class OrderLost(Exception):
    """The planner is gone, or back without the order; what it had commanded is carried out all the same."""


async def order_switch(
    bus: Bus, subjects: Subjects, verb: str, query: PlannerQuery, timeout_s: float, look_every_s: float = _LOOK_EVERY_S
) -> PlannerReply:
    """The planner's reply when the switch is over; OrderLost, BusError (also: no planner) or RejectedMessage."""
    asking = asyncio.ensure_future(bus.request(subjects.query_planner(verb), encode(query), timeout_s))
    watching = asyncio.ensure_future(_at_work(bus, subjects, look_every_s))
    try:
        await asyncio.wait({asking, watching}, return_when=asyncio.FIRST_COMPLETED)
        if asking.done():
            return PLANNER_REPLY.decode(asking.result())
        watching.result()
        raise OrderLost("the planner lost the order; nodes carry out the commands it stored (see `ei status`)")
    finally:
        asking.cancel()
        watching.cancel()
        await asyncio.gather(asking, watching, return_exceptions=True)


async def _at_work(bus: Bus, subjects: Subjects, look_every_s: float) -> None:
    """Returns when the planner no longer works on any order."""
    idle = 0
    while idle < _LOST_AFTER:
        await asyncio.sleep(look_every_s)
        try:
            data = await bus.request(subjects.query_planner("status"), encode(PlannerQuery()), _STATUS_S)
            idle = 0 if PLANNER_REPLY.decode(data).open_orders else idle + 1
        except NoResponders:
            idle += 1
        except (BusError, RejectedMessage):
            continue
