"""Waiting for something, but not for ever."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class CutShort(Exception):
    """An event or the time came first; the work was cancelled."""


async def bounded(work: Coroutine[Any, Any, Result], *events: asyncio.Event, timeout_s: float | None = None) -> Result:
    """The result of `work`, or CutShort once one of `events` is set or `timeout_s` has passed; raises what it raised.

    Whatever happens, `work` has ended when this returns.
    """
    task = asyncio.ensure_future(work)
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait([task, *waits], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended = task.done()
        for pending in (task, *waits):
            pending.cancel()
        await asyncio.wait([task, *waits])
    if not ended and task.cancelled():
        raise CutShort
    return task.result()
