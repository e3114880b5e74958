"""One timer that watches over an answer: a timer for each of its messages would cost more than the message."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds between keep-alives of a stream without tokens, and until a client that takes nothing is given up."""

    keep_alive_s: float
    idle_client_s: float


class Vigil:
    """Around the sending of one answer. `quiet` is called whenever nothing has been heard for `keep_alive_s`; a send
    that takes longer than `idle_client_s` is cancelled and leaves as TimeoutError."""

    def __init__(self, patience: Patience, quiet: Callable[[], None]) -> None:
        self._patience, self._quiet = patience, quiet
        self._step_s = min(patience.keep_alive_s, patience.idle_client_s)
        self._loop = asyncio.get_running_loop()
        self._limit = asyncio.timeout(None)
        self._heard_at = self._loop.time()
        self._sending_since: float | None = None

    async def __aenter__(self) -> "Vigil":
        await self._limit.__aenter__()
        self._timer = self._loop.call_later(self._step_s, self._look)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        await self._limit.__aexit__(kind, error, trace)

    def heard(self) -> None:
        """The engine said something."""
        self._heard_at = self._loop.time()

    def sending(self) -> None:
        """A send begins."""
        self._sending_since = self._loop.time()

    def sent(self) -> None:
        """The send is over."""
        self._sending_since = None

    def _look(self) -> None:
        """Act on what is overdue; look again when something may be."""
        now, since = self._loop.time(), self._sending_since
        if since is not None:
            due = since + self._patience.idle_client_s
            if due <= now:
                self._limit.reschedule(now)
                return
        else:
            due = self._heard_at + self._patience.keep_alive_s
            if due <= now:
                self._heard_at = now
                self._quiet()
                due = now + self._step_s
        self._timer = self._loop.call_at(min(due, now + self._step_s), self._look)
