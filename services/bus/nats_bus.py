"""The bus over NATS: one connection that outlives the broker."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from nats.aio.msg import Msg
from structlog.typing import FilteringBoundLogger

from services.bus.connection import Connection
from services.bus.follow import Follower
from services.bus.interest import Interest, Worker, into_mailbox
from services.bus.jetstream import JetStream, checked, stream_config
from services.bus.mailbox import DEFAULT_LIMIT, Mailbox, Responders
from services.bus.options import PENDING_BYTES, PING_S, Options
from services.bus.requests import is_no_responders
from services.bus.types import (
    UNAVAILABLE_AFTER_S,
    BusError,
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
    Subscription,
)
from services.observe import RateLimitedLog, logger

ERROR_HEADER = "Nats-Service-Error"
ERROR_CODE_HEADER = "Nats-Service-Error-Code"
MESSAGE_ID = "Nats-Msg-Id"
_STORE_S = 5.0
_DRAIN_S = 10.0


class NatsBus:
    """A `Bus` over one connection. Made by `connect`."""

    def __init__(self, connection: Connection, log: FilteringBoundLogger) -> None:
        self._connection, self._log = connection, log
        self._limited = RateLimitedLog(log, connection.clock)
        self.stats: BusStats = connection.stats
        self.jetstream = JetStream(self._ask_bytes)
        self._streams: dict[str, dict[str, Any]] = {}
        self._followers: list[Follower] = []
        self._reconnect_callbacks: list[Callable[[], Awaitable[None]]] = []
        connection.on_restored = self._restored

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        name: str,
        nkey_seed: str | None = None,
        inbox: str = "_INBOX",
        tls: ssl.SSLContext | None = None,
        timeout_s: float | None = None,
        ping_s: float = PING_S,
        pending_bytes: int = PENDING_BYTES,
        log: FilteringBoundLogger | None = None,
    ) -> "NatsBus":
        """Connect to `url` (several: separated by commas), waiting for the broker as long as it takes.

        BusRefused if it does not accept us; BusUnavailable after `timeout_s`, when given. `inbox` is the prefix of
        the subjects on which replies come in; a broker frozen for `ping_s` to twice that is taken as lost.
        """
        log = log or logger(name)
        connection = Connection(Options(url, name, nkey_seed, inbox, tls, ping_s, pending_bytes), log)
        await connection.open(timeout_s)
        return cls(connection, log)

    @property
    def max_payload_bytes(self) -> int:
        return self._connection.max_payload_bytes

    @property
    def connected(self) -> bool:
        return self._connection.connected

    @property
    def failure(self) -> Exception | None:
        return self._connection.failure

    def refusals(self) -> list[str]:
        return self._connection.refusals.current()

    async def publish(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        self._check_size(subject, data, headers)
        await self._connection.publish(subject, data, "", headers)

    def _check_size(self, subject: str, data: bytes, headers: Mapping[str, str] | None) -> None:
        PayloadTooLarge.check(subject, data, headers, self.max_payload_bytes)

    async def request(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        answer = await self._ask(subject, data, timeout_s)
        if answer.headers and ERROR_HEADER in answer.headers:
            raise RemoteError(answer.headers[ERROR_HEADER])
        return answer.data

    async def _ask_bytes(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        return (await self._ask(subject, data, timeout_s)).data

    async def _ask(self, subject: str, data: bytes, timeout_s: float, headers: Mapping[str, str] | None = None) -> Msg:
        self._check_size(subject, data, headers)
        connection = self._connection
        deadline = asyncio.get_running_loop().time() + timeout_s
        await connection.wait_restored(min(timeout_s, UNAVAILABLE_AFTER_S))
        reply, future = connection.inbox.ask(subject)
        try:
            await connection.publish(subject, data, reply, headers)
            async with asyncio.timeout_at(deadline):
                answer: Msg = await future
        except TimeoutError:
            if not connection.connected:
                raise BusUnavailable(f"the broker went away during a request to {subject}") from None
            raise BusTimeout(subject, timeout_s) from None
        finally:
            connection.inbox.forget(reply)
        if is_no_responders(answer):
            raise NoResponders(subject)
        return answer

    async def subscribe(
        self,
        subject: str,
        handler: Handler,
        *,
        queue: str = "",
        limit: int = DEFAULT_LIMIT,
        on_dropped: Callable[[int], None] | None = None,
    ) -> Subscription:
        mailbox = Mailbox(handler, self._connection.failed, limit=limit, on_dropped=on_dropped, name=subject)
        return await self._opened(subject, queue, mailbox, [mailbox])

    async def _opened(self, subject: str, queue: str, mailbox: Mailbox, workers: list[Worker]) -> Interest:
        receive = into_mailbox(mailbox, self.stats)
        interest = Interest(self._connection, subject, receive, workers, queue=queue, mailbox=mailbox)
        await interest.open()
        return interest

    async def respond(self, subject: str, responder: Responder, *, queue: str = "", limit: int = 256) -> Subscription:
        stats = EndpointStats(subject, queue)
        responders = Responders(responder, self._reply, stats, limit, self._limited)
        mailbox = Mailbox(responders.handle, self._connection.failed, name=subject)
        self.stats.endpoints.append(stats)
        return await self._opened(subject, queue, mailbox, [mailbox, responders])

    async def _reply(self, delivery: Delivery, data: bytes, error: str) -> None:
        """Answer a request; an answer that is too large becomes an error that says so."""
        if not delivery.reply:
            return
        if not error and len(data) > self.max_payload_bytes:
            error, data = str(PayloadTooLarge(delivery.reply, len(data), self.max_payload_bytes)), b""
        headers = {ERROR_HEADER: error[:512], ERROR_CODE_HEADER: "500"} if error else None
        await self._connection.publish(delivery.reply, data, "", headers)

    async def ensure_stream(
        self, name: str, subjects: list[str], *, max_age_s: float | None = None, last_per_subject: bool = False
    ) -> None:
        config = stream_config(name, subjects, max_age_s, last_per_subject)
        await self.jetstream.ensure_stream(config)
        self._streams[name] = config

    async def store(self, subject: str, data: bytes, message_id: str, headers: Mapping[str, str] | None = None) -> int:
        answer = await self._ask(subject, data, _STORE_S, {**(headers or {}), MESSAGE_ID: message_id})
        return int(checked(answer.data, subject)["seq"])

    async def follow(self, subject: str, handler: Handler, *, start: Start, durable: str | None = None) -> Subscription:
        connection = self._connection
        follower = Follower(
            jetstream=self.jetstream,
            publish=connection.publish,
            restored=connection.restored,
            inbox=connection.new_inbox(),
            stream=await self.jetstream.stream_of(subject),
            subject=subject,
            handler=handler,
            start=start,
            durable=durable,
            failed=connection.failed,
            log=self._limited,
        )
        interest = Interest(connection, f"{follower.inbox}.*", follower.receive, [follower], subject=subject)
        await interest.open()
        try:
            await follower.open()
        except BaseException:
            await interest.unsubscribe()
            raise
        self._followers.append(follower)
        return interest

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> None:
        self._reconnect_callbacks.append(callback)

    def on_failure(self, callback: Callable[[Exception], None]) -> None:
        self._connection.failure_callbacks.append(callback)

    async def _restored(self) -> None:
        """After a reconnect: streams first (the broker may have lost its store), then readers, then the owners."""
        try:
            for config in self._streams.values():
                await self.jetstream.ensure_stream(config)
        except BusError as error:
            self._log.warning("streams_not_ensured", error=str(error))
        for follower in self._followers:
            follower.interrupt()
        for callback in self._reconnect_callbacks:
            await callback()

    async def drain(self) -> None:
        await self._connection.drain(_DRAIN_S)

    async def close(self) -> None:
        await self._connection.close()
