"""Events on their way to the broker, in order, from a thread of their own: saying something never waits."""

import asyncio
import atexit
import logging
import os
import threading
import time
from collections import deque
from types import TracebackType
from typing import Self

from .connection import Connection, Unreachable
from .events import Event

MAX_WAITING = 10_000
_PAUSE_S = 0.5
_LOG = logging.getLogger("ei.harness")


class Publisher:
    """Sends what `say` is given. An event that is not stored within `patience_s` is dropped and logged; `close` waits
    at most `close_s`, and for a broker that does not answer `timeout_s`; what is never closed is closed when the
    program ends. May be used from any thread, from a coroutine, and in a forked process, which says what it says over a
    connection of its own. `stored` and `dropped` count events."""

    def __init__(
        self, url: str, nkey: str = "", *, timeout_s: float = 2.0, patience_s: float = 60.0, close_s: float = 8.0
    ) -> None:
        self.stored = self.dropped = 0
        self._address = (url, nkey, timeout_s)
        self._close_s, self._patience_s = close_s, patience_s
        self._left: list[Connection] = []
        self._begin()
        atexit.register(self.close)

    def _begin(self) -> None:
        """A thread and a connection of this process."""
        self._process = os.getpid()
        self._connection = Connection(*self._address)
        self._waiting: deque[tuple[float, Event]] = deque()
        self._changed = threading.Condition()
        self._closing_at: float | None = None
        self._over = False
        self._thread = threading.Thread(target=self._run, name="ei-harness", daemon=True)
        self._thread.start()

    def say(self, event: Event) -> None:
        """Queue an event; when too many wait, the oldest goes."""
        if self._process != os.getpid():
            self._left.append(self._connection)  # never closed here: its socket is the other process's too
            self._begin()
        with self._changed:
            if self._over:
                self._drop("the harness has ended")
                return
            if len(self._waiting) >= MAX_WAITING:
                self._waiting.popleft()
                self._drop("too many events wait for the broker")
            self._waiting.append((time.monotonic() + self._patience_s, event))
            self._changed.notify()

    def close(self) -> None:
        """Send what waits, and give up at the first failure."""
        atexit.unregister(self.close)
        if self._process != os.getpid():
            return
        with self._changed:
            self._closing_at = time.monotonic() + self._close_s
            self._changed.notify()
        self._thread.join(self._close_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            while (waiting := self._next()) is not None:
                runner.run(self._send(*waiting))
            runner.run(self._connection.close())

    def _next(self) -> tuple[float, Event] | None:
        """The next event; None when nothing waits and nothing more may come."""
        with self._changed:
            while not self._waiting and self._closing_at is None:
                self._changed.wait()
            if self._closing_at is not None and time.monotonic() >= self._closing_at:
                while self._waiting:
                    self._waiting.popleft()
                    self._drop("the harness ended before the broker took them")
            self._over = not self._waiting
            return None if self._over else self._waiting.popleft()

    async def _send(self, deadline: float, event: Event) -> None:
        while True:
            try:
                await self._connection.publish(event)
            except Unreachable as error:
                if self._closing_at is not None:
                    self._closing_at = time.monotonic()
                if self._closing_at is not None or time.monotonic() + _PAUSE_S > deadline:
                    self._drop(str(error) or type(error).__name__)
                    return
                await asyncio.sleep(_PAUSE_S)
            else:
                self.stored += 1
                return

    def _drop(self, why: str) -> None:
        self.dropped += 1
        if self.dropped == 1:
            _LOG.warning("branch events are lost, the first because: %s", why)
