"""Lets time pass as a model says, without drifting."""

import asyncio
from collections.abc import Awaitable, Callable

from services.clock import Clock

Sleep = Callable[[float], Awaitable[None]]
_SLACK_S = 0.05
"""How far an iteration may begin in the past, so that late wake-ups and our own work do not add up."""


class Pace:
    """`spend` ends when the modelled seconds, divided by `speed`, have passed since the last ones ended."""

    def __init__(self, clock: Clock, speed: float, sleep: Sleep = asyncio.sleep) -> None:
        self._clock, self._speed, self._sleep = clock, speed, sleep
        self._ended_at = float("-inf")

    async def spend(self, modelled_s: float) -> float:
        """Wait; returns the seconds it stands for on this clock."""
        seconds = modelled_s / self._speed
        now = self._clock.now()
        begin = self._ended_at if now - self._ended_at < _SLACK_S else now
        self._ended_at = begin + seconds
        await self._sleep(max(0.0, self._ended_at - now))
        return seconds
