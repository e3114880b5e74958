"""Reading a stream in order, over restarts of the broker."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from secrets import token_hex
from typing import Any, NamedTuple

import msgspec
from nats.aio.msg import Msg

from services.bus.jetstream import API, JetStream, nanoseconds
from services.bus.requests import status_of
from services.bus.types import NO_HEADERS, BusError, BusUnavailable, Delivery, Handler, Start
from services.observe import RateLimitedLog

_BATCH = 256
_PULL_S = 30.0
_HEARTBEAT_S = 3.0
_ACK_WAIT_S = 6.0
_INACTIVE_S = 60.0
_ACK, _WORKING = b"+ACK", b"+WPI"
_HEARTBEAT, _ENDED = "100", ("404", "408")

Publish = Callable[[str, bytes, str], Awaitable[None]]
"""Publish raw: subject, data, reply subject."""


class Position(NamedTuple):
    """Where a delivered message stands: its stream sequence, and its number among the consumer's deliveries."""

    stream: int
    consumer: int


class _Interrupted(Exception):
    """The consumer must be made anew: a gap, a silent broker, a reconnect."""


def position(reply: str) -> Position:
    """Read the reply subject of a stream message (`$JS.ACK....`, both of its forms)."""
    tokens = reply.split(".")
    first = 5 if len(tokens) == 9 else 7
    return Position(int(tokens[first]), int(tokens[first + 1]))


class Follower:
    """One reader of one stream: pulls batches, calls the handler, makes its consumer anew when anything is in doubt.

    Without a durable name the consumer is memory of the broker only, and the place is kept here: a new one starts
    behind the last message whose handler returned. With one, the broker keeps the place and gives out one message at
    a time, so that a message that comes again comes before any newer one.
    """

    def __init__(
        self,
        *,
        jetstream: JetStream,
        publish: Publish,
        restored: asyncio.Event,
        inbox: str,
        stream: str,
        subject: str,
        handler: Handler,
        start: Start,
        durable: str | None,
        failed: Callable[[Exception], None],
        log: RateLimitedLog,
    ) -> None:
        self.subject, self.inbox = subject, inbox
        self._jetstream, self._publish, self._restored, self._log = jetstream, publish, restored, log
        self._stream, self._handler, self._start, self._durable = stream, handler, start, durable
        self._failed = failed
        self._next: int | None = None
        self._session = 0
        self._consumer = ""
        self._messages: asyncio.Queue[Msg | None] = asyncio.Queue()
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    async def receive(self, message: Msg) -> None:
        """The callback of the inbox subscription."""
        self._messages.put_nowait(message)

    def _is_current(self, message: Msg) -> bool:
        """Not left over from a consumer or a pull before: data names its consumer, the broker's own words the pull."""
        return message.subject == self._reply or f".{self._consumer}." in message.reply

    @property
    def _reply(self) -> str:
        return f"{self.inbox}.{self._session}"

    def interrupt(self) -> None:
        """The connection is new: look again where we stand."""
        self._messages.put_nowait(None)

    async def open(self) -> None:
        """Make the consumer and begin; BusError if the stream cannot be read."""
        await self._create()
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"follow {self.subject}")

    async def join(self) -> None:
        """End after the message that is being handled."""
        self._stopping = True
        self.interrupt()
        if self._task is not None and self._task is not asyncio.current_task():
            await asyncio.wait([self._task])

    async def close(self) -> None:
        """End at once; the broker forgets the consumer by itself."""
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            while not self._stopping:
                await self._follow()
        except Exception as error:  # noqa: BLE001 - not swallowed: the owner of the bus ends
            self._failed(error)

    async def _follow(self) -> None:
        """Read until interrupted, then make the consumer anew, for as long as that takes."""
        try:
            await self._read()
        except _Interrupted as reason:
            if self._stopping:
                return
            self._log.warning("stream_interrupted", kind=self.subject, subject=self.subject, reason=str(reason))
        while not self._stopping:
            try:
                await self._restored.wait()
                await self._create()
                return
            except BusUnavailable:
                continue
            except BusError as error:
                self._log.warning("stream_unreadable", kind=self.subject, subject=self.subject, error=str(error))
                await asyncio.sleep(random.uniform(0.1, 1.0))

    async def _read(self) -> None:
        expected = 1
        while True:
            await self._pull()
            for _ in range(_BATCH):
                message = await self._message()
                if message is None:
                    break
                place = position(message.reply)
                if self._durable is None and place.consumer != expected:
                    raise _Interrupted(f"delivery {place.consumer} came where {expected} was due")
                expected += 1
                await self._handle(message, place.stream)

    async def _pull(self) -> None:
        body = {
            "batch": _BATCH,
            "expires": nanoseconds(_PULL_S),
            "idle_heartbeat": nanoseconds(_HEARTBEAT_S),
        }
        subject = f"{API}.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}"
        await self._publish(subject, msgspec.json.encode(body), self._reply)

    async def _message(self) -> Msg | None:
        """The next message; None when this pull has ended; _Interrupted when nobody is there."""
        while True:
            message = await self._arrival()
            status = status_of(message)
            if status is None:
                return message
            if status in _ENDED:
                return None
            if status != _HEARTBEAT:
                raise _Interrupted(f"status {status} {(message.headers or {}).get('Description', '')}".strip())

    async def _arrival(self) -> Msg:
        while True:
            if self._messages.empty():
                try:
                    async with asyncio.timeout(2.5 * _HEARTBEAT_S):
                        message = await self._messages.get()
                except TimeoutError:
                    raise _Interrupted("no heartbeat") from None
            else:
                message = self._messages.get_nowait()
            if message is None:
                raise _Interrupted("reconnected")
            if self._is_current(message):
                return message

    async def _handle(self, message: Msg, sequence: int) -> None:
        delivery = Delivery(message.subject, message.data, message.headers or NO_HEADERS, sequence)
        if self._durable is None:
            await self._handler(delivery)
            self._next = sequence + 1
            return
        working = asyncio.get_running_loop().create_task(self._keep_working(message.reply))
        try:
            await self._handler(delivery)
        finally:
            working.cancel()
        await self._publish(message.reply, _ACK, "")

    async def _keep_working(self, reply: str) -> None:
        """Tell the broker that a slow handler is still at it, so that the message does not come again meanwhile."""
        while True:
            await asyncio.sleep(_ACK_WAIT_S / 3)
            await self._publish(reply, _WORKING, "")

    async def _create(self) -> None:
        self._session += 1
        while not self._messages.empty():
            self._messages.get_nowait()
        if self._durable is not None:
            self._consumer = self._durable
            if await self._jetstream.has_consumer(self._stream, self._durable):
                return
            config = {"durable_name": self._durable, "ack_policy": "explicit", "max_ack_pending": 1}
            config |= {"ack_wait": nanoseconds(_ACK_WAIT_S)}
        else:
            self._consumer = f"f{token_hex(8)}"
            config = {"ack_policy": "none", "mem_storage": True, "inactive_threshold": nanoseconds(_INACTIVE_S)}
        config |= {"name": self._consumer, "filter_subject": self.subject, "replay_policy": "instant"}
        await self._jetstream.create_consumer(self._stream, config | await self._start_config())

    async def _start_config(self) -> dict[str, Any]:
        last = await self._jetstream.last_sequence(self._stream)
        if self._next is not None and self._next > last + 1:
            self._log.warning("stream_restarted", kind=self.subject, stream=self._stream, last=last, next=self._next)
            self._next = 1
        if self._next is None and self._start == "new":
            self._next = last + 1
        start = self._start if self._next is None else self._next
        if isinstance(start, int):
            return {"deliver_policy": "by_start_sequence", "opt_start_seq": max(1, start)}
        return {"deliver_policy": start}
