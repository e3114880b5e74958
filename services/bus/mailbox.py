"""Handlers at work: one mailbox per subscription, one task per request."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable

from schemas.codec import RejectedMessage
from services.bus.types import BusError, Delivery, EndpointStats, Handler, Responder
from services.observe import RateLimitedLog

DEFAULT_LIMIT = 65_536
LIMIT_BYTES = 64 << 20
_TURN = 64
"""Messages handled before other tasks get a turn, so that a handler that never waits cannot hold the loop."""

Failure = Callable[[Exception], None]
Reply = Callable[[Delivery, bytes, str], Awaitable[None]]
"""Send an answer: the request, the bytes, and "" or the text of an error."""


class Mailbox:
    """A bounded queue in front of one handler, and the task that empties it, one message at a time and in order.

    Messages that find `limit` others (the running one counts) or `limit_bytes` waiting are dropped.
    A handler that raises ends the mailbox and is reported to `failed`.
    """

    def __init__(
        self,
        handler: Handler,
        failed: Failure,
        *,
        limit: int = DEFAULT_LIMIT,
        limit_bytes: int = LIMIT_BYTES,
        on_dropped: Callable[[int], None] | None = None,
        name: str = "",
    ) -> None:
        self.dropped = 0
        self._handler, self._failed, self._on_dropped = handler, failed, on_dropped
        self._limit, self._limit_bytes = limit, limit_bytes
        self._waiting: deque[Delivery] = deque()
        self._waiting_bytes = 0
        self._reported = 0
        self._wake, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._task = asyncio.get_running_loop().create_task(self._work(), name=f"mailbox {name}")

    def offer(self, delivery: Delivery) -> bool:
        """Queue a message; False if it was dropped."""
        size = len(delivery.data)
        if len(self._waiting) >= self._limit or (self._waiting and self._waiting_bytes + size > self._limit_bytes):
            self.dropped += 1
            return False
        self._waiting.append(delivery)
        self._waiting_bytes += size
        self._idle.clear()
        self._wake.set()
        return True

    async def join(self) -> None:
        """Wait until every queued message was handled."""
        await self._idle.wait()

    async def close(self) -> None:
        """Drop what waits and cancel the running handler."""
        self._waiting.clear()
        self._task.cancel()
        if self._task is not asyncio.current_task():
            await asyncio.wait([self._task])
        self._idle.set()

    async def _work(self) -> None:
        try:
            while True:
                await self._wake.wait()
                await self._empty()
                self._wake.clear()
                self._idle.set()
        except Exception as error:  # noqa: BLE001 - not swallowed: the owner of the bus ends
            self._idle.set()
            self._failed(error)

    async def _empty(self) -> None:
        turn = 0
        while self._waiting:
            delivery = self._waiting[0]
            await self._handler(delivery)
            if self._waiting:
                self._waiting.popleft()
                self._waiting_bytes -= len(delivery.data)
            if self.dropped != self._reported:
                missing, self._reported = self.dropped - self._reported, self.dropped
                if self._on_dropped is not None:
                    self._on_dropped(missing)
            turn += 1
            if turn % _TURN == 0:
                await asyncio.sleep(0)


class Responders:
    """Runs one responder: a task per request, at most `limit` at once, later ones wait in the mailbox. Where that is
    one, the mailbox's own task answers."""

    def __init__(
        self, responder: Responder, reply: Reply, stats: EndpointStats, limit: int, log: RateLimitedLog
    ) -> None:
        self.stats, self._log = stats, log
        self._responder, self._reply = responder, reply
        self._in_turn = limit == 1
        self._room = asyncio.Semaphore(limit)
        self._running: set[asyncio.Task[None]] = set()

    async def handle(self, delivery: Delivery) -> None:
        """The mailbox's handler: start the answer, wait only for room."""
        if self._in_turn:
            await self._answer(delivery)
            return
        await self._room.acquire()
        task = asyncio.get_running_loop().create_task(self._answer(delivery), name=f"respond {delivery.subject}")
        self._running.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._room.release()

    async def _answer(self, delivery: Delivery) -> None:
        started, text, data = time.perf_counter_ns(), "", b""
        try:
            data = await self._responder(delivery)
            await self._reply(delivery, data, "")
        except RejectedMessage as error:
            text = f"rejected: {error}"
            self._log.warning("request_rejected", kind=self.stats.subject, subject=delivery.subject, error=str(error))
            await self._refuse(delivery, text)
        except Exception as error:  # noqa: BLE001 - counted, logged and told to the requester
            text = f"{type(error).__name__}: {error}"
            subject = self.stats.subject
            self._log.warning("responder_failed", kind=subject, subject=delivery.subject, exc_info=error)
            await self._refuse(delivery, text)
        self.stats.requests += 1
        self.stats.processing_ns += time.perf_counter_ns() - started
        if text:
            self.stats.errors += 1
            self.stats.last_error = text

    async def _refuse(self, delivery: Delivery, text: str) -> None:
        try:
            await self._reply(delivery, b"", text)
        except BusError as error:
            self._log.warning("answer_not_sent", kind=self.stats.subject, subject=delivery.subject, error=str(error))

    async def join(self) -> None:
        """Wait for the answers under way."""
        while self._running:
            await asyncio.wait(self._running)

    async def close(self) -> None:
        """Cancel the answers under way."""
        for task in self._running:
            task.cancel()
        await self.join()
