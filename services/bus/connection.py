"""The connection to the broker: opened once, reopened for ever."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.subscription import Subscription as NatsSubscription
from structlog.typing import FilteringBoundLogger

from services.bus.interest import Interest
from services.bus.options import FLUSH_S, RECONNECT_FROM_S, RECONNECT_TO_S, Options, dial
from services.bus.refusals import Refusals, parse_refusal
from services.bus.requests import Inbox
from services.bus.types import UNAVAILABLE_AFTER_S, BusRefused, BusStats, BusUnavailable
from services.clock import SystemClock
from services.observe import RateLimitedLog

_REOPEN_S = 5.0
_CANCEL_AGAIN_S = 0.1
_AUTHORIZATION = "authorization violation"


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel until it has ended: `asyncio.wait_for` of Python 3.11, by which nats-py dials, can lose a cancellation."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_CANCEL_AGAIN_S)


class Connection:
    """One nats-py client and what it does not do: jitter, refusals, an end to questions when the broker is away."""

    def __init__(self, options: Options, log: FilteringBoundLogger) -> None:
        self.options, self.client, self.clock = options, Client(), SystemClock()
        self.stats, self.interests, self.inbox = BusStats(), list[Interest](), Inbox(options.inbox)
        self.refusals = Refusals(self.clock)
        self.restored = asyncio.Event()
        self.failure: Exception | None = None
        self.failure_callbacks: list[Callable[[Exception], None]] = []
        self.on_restored: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._log, self._limited = log, RateLimitedLog(log, self.clock)
        self._closing = self._dialled = False
        self._away: asyncio.TimerHandle | None = None
        self._refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._inboxes = 0
        self._replies: NatsSubscription | None = None

    @property
    def connected(self) -> bool:
        return self.restored.is_set() and bool(self.client.is_connected)

    @property
    def max_payload_bytes(self) -> int:
        return int(self.client.max_payload)

    def new_inbox(self) -> str:
        """A prefix of reply subjects of one's own."""
        self._inboxes += 1
        return f"{self.inbox.prefix}.i{self._inboxes}"

    async def open(self, timeout_s: float | None) -> None:
        """Connect, waiting for the broker; BusRefused, BusUnavailable after `timeout_s`."""
        connecting = asyncio.get_running_loop().create_task(self._connect())
        try:
            await asyncio.wait({connecting, self._refused}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self._refused.done():
                raise BusRefused(f"{self.options.url} does not accept {self.options.name}: check its nkey")
            if not connecting.done():
                raise BusUnavailable(f"no broker at {self.options.url} within {timeout_s:g} s")
            await connecting
        except BaseException:
            await _end(connecting)
            await self.close()
            raise
        self.restored.set()
        self._replies = await self.client.subscribe(self.inbox.pattern, cb=self.inbox.receive)

    async def _connect(self) -> None:
        self._dialled = True
        await dial(
            self.client,
            self.options,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
            closed_cb=self._on_closed,
        )

    async def publish(
        self, subject: str, data: bytes, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        """Send, or buffer while the broker is away; BusUnavailable when the buffer is full or the end has come."""
        try:
            await self.client.publish(subject, data, reply, dict(headers) if headers else None)
        except nats.errors.OutboundBufferLimitError:
            limit = self.options.pending_bytes
            raise BusUnavailable(f"{len(data)} bytes do not fit into the {limit} bytes kept for the broker") from None
        except (nats.errors.ConnectionClosedError, nats.errors.ConnectionDrainingError):
            raise BusUnavailable("the connection to the broker is closed") from None

    async def wait_restored(self, timeout_s: float) -> None:
        """Return at once when connected, else when connected again; BusUnavailable after `timeout_s`."""
        if self.restored.is_set():
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self.restored.wait()
        except TimeoutError:
            raise BusUnavailable(f"the broker has been away for {timeout_s:g} s") from None

    async def confirm(self) -> None:
        """Wait until the broker has taken what was sent so far; at most 2 s, and not at all while it is away."""
        if self.connected:
            await asyncio.wait([self.start(self._round_trip(), "confirm")], timeout=FLUSH_S)

    async def _round_trip(self) -> None:
        # nats-py breaks its reader when an answer comes after the flush was given up: leave it the time in which the
        # pings declare the connection dead.
        try:
            await self.client.flush(timeout=round(FLUSH_S + 3 * self.options.ping_s) + 1)
        except (nats.errors.Error, OSError) as error:
            self._limited.warning("broker_silent", error=str(error))

    def failed(self, error: Exception) -> None:
        """A handler raised: tell the owner."""
        self.failure = self.failure or error
        self._log.error("bus_failed", exc_info=error)
        for callback in self.failure_callbacks:
            callback(error)

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run something of ours beside the callbacks of nats-py, which must return at once."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self.failed(error)

    async def _on_error(self, error: Exception) -> None:
        refusal = parse_refusal(str(error))
        if refusal is not None:
            self._on_refusal(str(error), refusal.subject)
            self.refusals.add(refusal)
            if refusal.action == "publish":
                self.inbox.fail(BusRefused(str(refusal)), refusal.subject)
            else:
                self.start(self._reopen(refusal.subject), "reopen")
        elif _AUTHORIZATION in str(error).lower():
            if not self._refused.done():
                self._refused.set_result(None)
            self.refusals.key_refused = True
            self._limited.warning("broker_refuses_us", error=str(error))
        else:
            self._limited.warning("broker_error", kind=type(error).__name__, error=str(error) or type(error).__name__)

    def _on_refusal(self, text: str, subject: str) -> None:
        self.stats.refused += 1
        self._limited.warning("permission_refused", kind=subject, subject=subject, error=text)

    async def _reopen(self, subject: str) -> None:
        """Permissions may be granted later: ask again for a refused subscription."""
        await asyncio.sleep(_REOPEN_S)
        for interest in list(self.interests):
            if interest.pattern.casefold() == subject.casefold() and not self._closing:
                await interest.reopen()

    async def _on_disconnected(self) -> None:
        if self._closing:
            return
        self.restored.clear()
        self._limited.warning("broker_lost", url=self.options.url)
        if self._away is None:
            loop = asyncio.get_running_loop()
            self._away = loop.call_later(UNAVAILABLE_AFTER_S, self.inbox.lost, UNAVAILABLE_AFTER_S)

    async def _on_reconnected(self) -> None:
        if self._away is not None:
            self._away.cancel()
            self._away = None
        self.stats.reconnects += 1
        self.refusals.clear()
        self.restored.set()
        self._log.info("broker_restored", url=self.options.url, reconnects=self.stats.reconnects)
        if self.on_restored is not None:
            self.start(self.on_restored(), "restored")

    async def _on_closed(self) -> None:
        if not self._closing:
            self.start(self._renew(), "renew")

    async def _renew(self) -> None:
        """The broker told us to go (as when our key is taken away), after which nats-py gives up: begin anew."""
        self.client, self._dialled = Client(), False
        await asyncio.sleep(random.uniform(RECONNECT_FROM_S, RECONNECT_TO_S))
        await self._connect()
        self._replies = await self.client.subscribe(self.inbox.pattern, cb=self.inbox.receive)
        for interest in list(self.interests):
            await interest.reopen()
        await self._on_reconnected()

    async def drain(self, timeout_s: float) -> None:
        """Take no more messages, finish those received, send what is buffered, close."""
        interests = list(self.interests)
        for interest in interests:
            await interest.silence()
        if interests:
            joined = [asyncio.ensure_future(interest.join()) for interest in interests]
            _, late = await asyncio.wait(joined, timeout=timeout_s)
            for interest, task in zip(interests, joined, strict=True):
                if task in late:
                    self._log.warning("drain_timed_out", subject=interest.subject, timeout_s=timeout_s)
                    task.cancel()
                await interest.unsubscribe()
        await self.confirm()
        await self.close()

    async def close(self) -> None:
        """Give up everything at once."""
        self._closing = True
        if self._away is not None:
            self._away.cancel()
        for interest in list(self.interests):
            await interest.unsubscribe()
        self.inbox.fail(BusUnavailable("the connection to the broker is closed"))
        for task in list(self._tasks):
            await _end(task)
        await self._close_client()

    async def _close_client(self) -> None:
        if self.client.is_closed or not self._dialled:  # nats-py cannot close a client that never dialled
            return
        unsent = self.client.pending_data_size
        try:
            if self._replies is not None:
                await self._replies.unsubscribe()
            await self.client.close()
        except OSError as error:
            self._log.warning("closed_unsent", unsent_bytes=unsent, error=str(error))
