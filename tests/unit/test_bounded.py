"""Bounded waiting: the result, its error, or cut short, and nothing left running."""

import asyncio

import pytest

from services.bounded import CutShort, bounded


async def test_returns_what_the_work_returns() -> None:
    async def work() -> int:
        return 7

    assert await bounded(work(), asyncio.Event(), timeout_s=5) == 7


async def test_raises_what_the_work_raises() -> None:
    async def work() -> None:
        raise ValueError("3 exceeds 2")

    with pytest.raises(ValueError, match="3 exceeds 2"):
        await bounded(work(), asyncio.Event())


@pytest.mark.parametrize("how", ["event", "time"])
async def test_cut_short_means_cancelled_and_ended(how: str) -> None:
    event, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    if how == "event":
        asyncio.get_running_loop().call_later(0.01, event.set)
    with pytest.raises(CutShort):
        await bounded(work(), event, timeout_s=0.02 if how == "time" else None)
    assert ended.is_set()


async def test_cancelling_the_waiter_ends_the_work() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    waiter = asyncio.ensure_future(bounded(work(), asyncio.Event()))
    await begun.wait()
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert ended.is_set()


async def test_work_that_ends_while_it_is_cancelled_counts() -> None:
    async def work() -> str:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            return "saved"
        return "whole"

    assert await bounded(work(), timeout_s=0.01) == "saved"
