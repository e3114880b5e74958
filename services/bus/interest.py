"""One subscription of a connection: what the broker sends us, and who works on it."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from services.bus.mailbox import Mailbox
from services.bus.types import NO_HEADERS, BusStats, Delivery

if TYPE_CHECKING:
    from services.bus.connection import Connection

_UNLIMITED = 0
Receive = Callable[[Msg], Awaitable[None]]


class Worker(Protocol):
    """Something that works on messages."""

    async def join(self) -> None:
        """Finish what was received."""
        ...

    async def close(self) -> None:
        """Give up at once."""
        ...


def into_mailbox(mailbox: Mailbox, stats: BusStats) -> Receive:
    """A callback for nats-py that only hands over."""

    async def receive(message: Msg) -> None:
        delivery = Delivery(message.subject, message.data, message.headers or NO_HEADERS, None, message.reply)
        if not mailbox.offer(delivery):
            stats.dropped += 1

    return receive


class Interest:
    """A `Subscription`: `pattern` is what the broker is asked for, `subject` what the owner asked for."""

    def __init__(
        self,
        connection: "Connection",
        pattern: str,
        receive: Receive,
        workers: Sequence[Worker],
        *,
        subject: str = "",
        queue: str = "",
        mailbox: Mailbox | None = None,
    ) -> None:
        self.subject, self.pattern, self.queue = subject or pattern, pattern, queue
        self._connection, self._receive, self._workers, self._mailbox = connection, receive, workers, mailbox
        self._subscription: NatsSubscription | None = None

    @property
    def dropped(self) -> int:
        return self._mailbox.dropped if self._mailbox is not None else 0

    async def open(self) -> None:
        """Ask the broker for it and wait until it is in force (when the broker is away: from the reconnect on)."""
        # The queue of nats-py hands over to ours at once; only ours may drop.
        self._subscription = await self._connection.client.subscribe(
            self.pattern, self.queue, cb=self._receive, pending_msgs_limit=_UNLIMITED, pending_bytes_limit=_UNLIMITED
        )
        self._connection.interests.append(self)
        await self._connection.confirm()

    async def reopen(self) -> None:
        """Ask again for what the broker refused or took away; no longer refused only if it does not say so again."""
        refusals = self._connection.refusals
        said = refusals.said(self.pattern)
        await self._withdraw()
        await self.open()
        if refusals.said(self.pattern) == said:
            refusals.granted(self.pattern)

    async def silence(self) -> None:
        """No further messages; what was received stays."""
        await self._withdraw()
        self._connection.refusals.granted(self.pattern)

    async def _withdraw(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is None:
            return
        self._connection.interests.remove(self)
        try:
            await subscription.unsubscribe()
        except (nats.errors.ConnectionClosedError, nats.errors.BadSubscriptionError):
            return

    async def join(self) -> None:
        for worker in self._workers:
            await worker.join()

    async def unsubscribe(self) -> None:
        await self.silence()
        for worker in self._workers:
            await worker.close()
