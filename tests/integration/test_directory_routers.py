"""Requests of a router that is gone are not waited for."""

from directory_service import SUBJECTS, B, Connect, directory, eventually, match, sees, stats

from schemas.codec import encode
from schemas.telemetry import RouterTelemetry
from services.bus import Bus


async def beat(bus: Bus, router: str, incarnation: int) -> None:
    told = RouterTelemetry(router=router, t=0.0, incarnation=incarnation, open_requests=1)
    await bus.publish(SUBJECTS.telemetry_router(router), encode(told))


async def pending(bus: Bus, expected: int) -> None:
    async def reached() -> bool:
        return (await stats(bus)).pending == expected

    await eventually(reached)


async def test_a_router_that_began_anew_or_is_silent_leaves_nothing_pending(connect: Connect) -> None:
    bus = await connect()
    async with directory(await connect(), node_timeout_s=0.5):
        await sees(bus)
        await match(bus, B, request="r0", router="one", incarnation=1)
        await match(bus, B, request="r1")
        await pending(bus, 2)
        await beat(bus, "one", 2)
        await pending(bus, 1)
        await match(bus, B, request="r2", router="one", incarnation=2)
        await pending(bus, 2)
        await pending(bus, 1)
        assert (await match(bus, B, request="r3")).pending_request == "r1"
