"""The broker in memory: routes between its buses and holds their streams."""

import asyncio
from typing import TYPE_CHECKING

from services.bus.mailbox import Mailbox, Responders
from services.bus.memory_stream import MemoryStream
from services.bus.subjects import matches
from services.bus.types import Delivery

if TYPE_CHECKING:
    from services.bus.memory import MemoryBus

MESSAGE_ID = "Nats-Msg-Id"


class MemorySubscription:
    """One interest of one bus."""

    def __init__(self, hub: "MemoryHub", subject: str, queue: str, mailbox: Mailbox) -> None:
        self.subject, self.queue, self.mailbox = subject, queue, mailbox
        self._hub = hub
        self.responders: Responders | None = None

    @property
    def dropped(self) -> int:
        return self.mailbox.dropped

    async def unsubscribe(self) -> None:
        self._hub.remove(self)
        await self.mailbox.close()
        if self.responders is not None:
            await self.responders.close()


class MemoryHub:
    """The broker: routes between its buses and holds the streams. `down` and `up` play an outage."""

    def __init__(self, max_payload_bytes: int = 8 << 20) -> None:
        self.max_payload_bytes = max_payload_bytes
        self.connected = True
        self.streams: dict[str, MemoryStream] = {}
        self.buses: list[MemoryBus] = []
        self.inboxes: dict[str, asyncio.Future[Delivery]] = {}
        self.restored = asyncio.Event()
        self.restored.set()
        self._subscriptions: list[MemorySubscription] = []
        self._turn = 0

    def add(self, subscription: MemorySubscription) -> None:
        self._subscriptions.append(subscription)

    def remove(self, subscription: MemorySubscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
        for stream in self.streams.values():
            stream.leave(subscription.mailbox)

    def route(self, delivery: Delivery) -> int:
        """Deliver to every plain subscription and one member of each queue group; returns how many took it."""
        inbox = self.inboxes.get(delivery.subject)
        if inbox is not None and not inbox.done():
            inbox.set_result(delivery)
            return 1
        groups: dict[str, list[MemorySubscription]] = {}
        chosen: list[MemorySubscription] = []
        for subscription in self._subscriptions:
            if matches(subscription.subject, delivery.subject):
                (groups.setdefault(subscription.queue, []) if subscription.queue else chosen).append(subscription)
        self._turn += 1
        chosen += [members[self._turn % len(members)] for members in groups.values()]
        for subscription in chosen:
            subscription.mailbox.offer(delivery)
        stream = self.stream_of(delivery.subject)
        if stream is not None:
            stream.append(delivery, delivery.headers.get(MESSAGE_ID))
        return len(chosen)

    def stream_of(self, subject: str) -> MemoryStream | None:
        """The stream that takes this subject (or pattern)."""
        return next((s for s in self.streams.values() if any(matches(p, subject) for p in s.subjects)), None)

    def down(self) -> None:
        """Lose the broker: publishes wait, requests fail after 2 s."""
        self.connected = False
        self.restored.clear()

    async def up(self) -> None:
        """Bring it back: what waited is sent, then the reconnect callbacks run."""
        self.connected = True
        self.restored.set()
        for bus in list(self.buses):
            await bus.reconnected()
