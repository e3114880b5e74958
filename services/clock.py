"""Time as the services see it: a monotonic clock for durations, the wall clock for people."""

import time
from typing import Protocol


class Clock(Protocol):
    """Two clocks; never subtract a wall time from a monotonic one."""

    def now(self) -> float:
        """Monotonic seconds: every duration, deadline and order of this process."""
        ...

    def wall(self) -> float:
        """Unix seconds: the `t` of events and the skew gauges, nothing else."""
        ...


class SystemClock:
    """The clocks of this machine."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


def incarnation_above(last: int = 0) -> int:
    """A number for a new life of a service: this moment in Unix nanoseconds, or just above `last`, the highest known of
    its former lives, where the clock went back. A life that nobody knew of is corrected by those who refuse it."""
    return max(time.time_ns(), last + 1)
