"""A bus in memory, with the semantics of the real one: for tests and for several services in one process."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping

from structlog.typing import FilteringBoundLogger

from services.bus.mailbox import DEFAULT_LIMIT, Mailbox, Responders
from services.bus.memory_hub import MESSAGE_ID, MemoryHub, MemorySubscription
from services.bus.memory_stream import MemoryStream
from services.bus.types import (
    NO_HEADERS,
    UNAVAILABLE_AFTER_S,
    BusStats,
    BusTimeout,
    BusUnavailable,
    Delivery,
    EndpointStats,
    Handler,
    NoResponders,
    PayloadTooLarge,
    RemoteError,
    Responder,
    Start,
)
from services.clock import SystemClock
from services.observe import RateLimitedLog, logger

ERROR_HEADER = "Nats-Service-Error"


class MemoryBus:
    """One service's connection to a `MemoryHub`; a `Bus`."""

    def __init__(self, hub: MemoryHub, log: FilteringBoundLogger | None = None) -> None:
        self._hub = hub
        self._log = log or logger("bus")
        self._limited = RateLimitedLog(self._log, SystemClock())
        self.stats = BusStats()
        self._subscriptions: list[MemorySubscription] = []
        self._buffer: list[Delivery] = []
        self._reconnect_callbacks: list[Callable[[], Awaitable[None]]] = []
        self._failure_callbacks: list[Callable[[Exception], None]] = []
        self.failure: Exception | None = None
        self._inbox = 0
        hub.buses.append(self)

    @property
    def max_payload_bytes(self) -> int:
        return self._hub.max_payload_bytes

    @property
    def connected(self) -> bool:
        return self._hub.connected

    def refusals(self) -> list[str]:
        return []

    async def publish(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        self._send(Delivery(subject, data, headers or NO_HEADERS))

    def _send(self, delivery: Delivery) -> int:
        PayloadTooLarge.check(delivery.subject, delivery.data, delivery.headers, self.max_payload_bytes)
        if self._hub.connected:
            return self._hub.route(delivery)
        self._buffer.append(delivery)
        return 1

    async def _up(self, timeout_s: float) -> None:
        if not self._hub.connected:
            limit = min(timeout_s, UNAVAILABLE_AFTER_S)
            try:
                async with asyncio.timeout(limit):
                    await self._hub.restored.wait()
            except TimeoutError:
                raise BusUnavailable(f"the broker has been away for {limit:g} s") from None

    async def request(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        PayloadTooLarge.check(subject, data, None, self.max_payload_bytes)
        await self._up(timeout_s)
        self._inbox += 1
        reply = f"_INBOX.{id(self):x}.{self._inbox}"
        future: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
        self._hub.inboxes[reply] = future
        try:
            if not self._send(Delivery(subject, data, reply=reply)):
                raise NoResponders(subject)
            async with asyncio.timeout(timeout_s):
                answer = await future
        except TimeoutError:
            raise BusTimeout(subject, timeout_s) from None
        finally:
            del self._hub.inboxes[reply]
        if ERROR_HEADER in answer.headers:
            raise RemoteError(answer.headers[ERROR_HEADER])
        return answer.data

    async def subscribe(
        self,
        subject: str,
        handler: Handler,
        *,
        queue: str = "",
        limit: int = DEFAULT_LIMIT,
        on_dropped: Callable[[int], None] | None = None,
    ) -> MemorySubscription:
        mailbox = Mailbox(handler, self._failed, limit=limit, on_dropped=on_dropped, name=subject)
        return self._added(MemorySubscription(self._hub, subject, queue, mailbox))

    def _added(self, subscription: MemorySubscription) -> MemorySubscription:
        self._subscriptions.append(subscription)
        self._hub.add(subscription)
        return subscription

    async def respond(
        self, subject: str, responder: Responder, *, queue: str = "", limit: int = 256
    ) -> MemorySubscription:
        stats = EndpointStats(subject, queue)
        self.stats.endpoints.append(stats)
        responders = Responders(responder, self._reply, stats, limit, self._limited)
        subscription = await self.subscribe(subject, responders.handle, queue=queue)
        subscription.responders = responders
        return subscription

    async def _reply(self, delivery: Delivery, data: bytes, error: str) -> None:
        if delivery.reply:
            self._send(Delivery(delivery.reply, data, {ERROR_HEADER: error} if error else NO_HEADERS))

    async def ensure_stream(
        self, name: str, subjects: list[str], *, max_age_s: float | None = None, last_per_subject: bool = False
    ) -> None:
        stream = self._hub.streams.setdefault(name, MemoryStream(subjects, last_per_subject))
        stream.subjects, stream.last_per_subject = subjects, last_per_subject

    async def store(self, subject: str, data: bytes, message_id: str, headers: Mapping[str, str] | None = None) -> int:
        PayloadTooLarge.check(subject, data, None, self.max_payload_bytes)
        await self._up(UNAVAILABLE_AFTER_S)
        stream = self._hub.stream_of(subject)
        if stream is None:
            raise NoResponders(subject)
        delivery = Delivery(subject, data, {**(headers or {}), MESSAGE_ID: message_id})
        self._hub.route(delivery)
        return stream.sequence_of[message_id]

    async def follow(
        self, subject: str, handler: Handler, *, start: Start, durable: str | None = None
    ) -> MemorySubscription:
        stream = self._hub.stream_of(subject)
        if stream is None:
            raise NoResponders(subject)

        async def handle(delivery: Delivery) -> None:
            await handler(delivery)
            if durable is not None and delivery.sequence is not None:
                stream.places[durable] = delivery.sequence + 1

        mailbox = Mailbox(handle, self._failed, limit=sys.maxsize, limit_bytes=sys.maxsize, name=subject)
        stream.join(mailbox, subject, stream.places.get(durable, start) if durable is not None else start)
        subscription = MemorySubscription(self._hub, subject, "", mailbox)
        self._subscriptions.append(subscription)
        return subscription

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> None:
        self._reconnect_callbacks.append(callback)

    def on_failure(self, callback: Callable[[Exception], None]) -> None:
        self._failure_callbacks.append(callback)

    def _failed(self, error: Exception) -> None:
        self.failure = self.failure or error
        self._log.error("handler_failed", exc_info=error)
        for callback in self._failure_callbacks:
            callback(error)

    async def reconnected(self) -> None:
        """The hub is back: send what waited, tell the owners."""
        waiting, self._buffer = self._buffer, []
        for delivery in waiting:
            self._hub.route(delivery)
        self.stats.reconnects += 1
        for callback in self._reconnect_callbacks:
            await callback()

    async def drain(self) -> None:
        for subscription in self._subscriptions:
            self._hub.remove(subscription)
        for subscription in self._subscriptions:
            await subscription.mailbox.join()
            if subscription.responders is not None:
                await subscription.responders.join()

    async def close(self) -> None:
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        if self in self._hub.buses:
            self._hub.buses.remove(self)
