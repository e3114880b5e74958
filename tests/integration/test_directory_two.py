"""Two directories at once: the older steps down once the newer sees, and serves again when that one is gone."""

import aiohttp
from directory_service import (
    B,
    Connect,
    Pool,
    claims,
    context,
    directory,
    eventually,
    match,
    sees,
    stats,
    stored,
    tell,
)

from services.app import App
from services.bus import NoResponders
from services.directory.settings import DirectorySettings


async def readiness(app: App[DirectorySettings]) -> str:
    """What /ready says."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{app.http_port}/ready") as response,
    ):
        return await response.text()


async def stands_by(app: App[DirectorySettings]) -> None:
    async def yes() -> bool:
        return "stands by" in await readiness(app)

    await eventually(yes)


async def test_the_older_stands_by_and_takes_over_again(connect: Connect) -> None:
    bus = await connect()
    pool = Pool(await connect(), "p1")
    await pool.start()
    async with directory(await connect(), takeover_s=1.5) as older:
        await sees(bus)
        await pool.store(stored(B))
        await tell(bus, context(1, "a", B[:4]))
        await claims(bus, 4)
        first = (await stats(bus)).incarnation
        async with directory(await connect(), takeover_s=1.5):
            await stands_by(older)

            async def newer_answers() -> bool:
                return (await stats(bus)).incarnation > first

            await eventually(newer_answers)
            second = (await stats(bus)).incarnation
            assert [(await stats(bus)).incarnation for _ in range(5)] == [second] * 5, "only the newer answers"
            await tell(bus, context(2, "b", B))
            await claims(bus, 12)

            async def told() -> bool:
                return sum(referenced for referenced, _ in pool.bits.values()) == 8

            await eventually(told)
            told_by = {incarnation for incarnation, _, _ in pool.heard[-1:]}
            assert told_by == {second}

        async def served_by_another() -> bool:
            try:
                return (await stats(bus)).incarnation > second
            except NoResponders:
                return False

        async def back() -> bool:
            return "stands by" not in await readiness(older)

        await eventually(back)
        await eventually(served_by_another)
        assert (await match(bus, B)).blocks == 8
        await claims(bus, 12)

        async def all_anew() -> bool:
            return pool.heard[-1][0] > second and sum(referenced for referenced, _ in pool.bits.values()) == 8

        await eventually(all_anew)
