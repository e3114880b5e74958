"""What every bus can do, and the words its errors are told in."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, Protocol

NO_HEADERS: Mapping[str, str] = MappingProxyType({})
UNAVAILABLE_AFTER_S = 2.0
"""How long a request or a stored message waits for a lost broker before it fails."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message as it arrived. `sequence` is its stream sequence, None outside of streams."""

    subject: str
    data: bytes
    headers: Mapping[str, str] = field(default_factory=lambda: NO_HEADERS)
    sequence: int | None = None
    reply: str = ""


Handler = Callable[[Delivery], Awaitable[None]]
Responder = Callable[[Delivery], Awaitable[bytes]]
Start = Literal["all", "last_per_subject", "new"] | int


class BusError(Exception):
    """Whatever may go wrong between us and a message's receiver."""


class NoResponders(BusError):
    """Nobody answers on this subject."""

    def __init__(self, subject: str) -> None:
        super().__init__(f"nobody answers on {subject}")
        self.subject = subject


class BusTimeout(BusError):
    """No answer within the time given."""

    def __init__(self, subject: str, timeout_s: float) -> None:
        super().__init__(f"no answer on {subject} within {timeout_s:g} s")
        self.subject = subject


class BusUnavailable(BusError):
    """The broker is not reachable, or more waits for it than may be buffered."""


class BusRefused(BusError):
    """The broker refuses this client: its key, or what it asked to publish or subscribe."""


class PayloadTooLarge(BusError):
    """A message with its headers is larger than the broker takes."""

    def __init__(self, subject: str, size: int, limit: int) -> None:
        super().__init__(f"{size} bytes for {subject} exceed the broker's limit of {limit} bytes")
        self.size, self.limit = size, limit

    @classmethod
    def check(cls, subject: str, data: bytes, headers: Mapping[str, str] | None, limit: int) -> None:
        """Raise if `data` with its headers, which count too, exceeds `limit`."""
        size = len(data)
        if headers:
            size += len("NATS/1.0\r\n\r\n") + sum(len(f"{k}: {v}\r\n".encode()) for k, v in headers.items())
        if size > limit:
            raise cls(subject, size, limit)


class RemoteError(BusError):
    """The responder failed; the text is what it said."""


class StreamError(BusError):
    """The broker refused a stream or consumer request; `code` is its error code."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


@dataclass(slots=True)
class EndpointStats:
    """What one responder did so far, in the words of the NATS services protocol."""

    subject: str
    queue: str
    requests: int = 0
    errors: int = 0
    processing_ns: int = 0
    last_error: str = ""


@dataclass(slots=True)
class BusStats:
    """Counters of one connection, read by the metrics page."""

    reconnects: int = 0
    dropped: int = 0
    refused: int = 0
    endpoints: list[EndpointStats] = field(default_factory=list)


class Subscription(Protocol):
    """Interest in a subject until `unsubscribe`."""

    @property
    def subject(self) -> str: ...

    @property
    def dropped(self) -> int:
        """Messages that never reached the handler because it was too slow."""
        ...

    async def unsubscribe(self) -> None:
        """Stop delivery; what was queued is dropped, a running handler is cancelled."""
        ...


class Bus(Protocol):
    """Publish, request and stream messages; reconnects by itself for ever."""

    @property
    def max_payload_bytes(self) -> int:
        """The largest message the broker takes, headers included."""
        ...

    @property
    def connected(self) -> bool: ...

    @property
    def stats(self) -> BusStats: ...

    def refusals(self) -> list[str]:
        """What the broker does not let this client do now, each naming its subject; [] is healthy."""
        ...

    async def publish(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Fire and forget; buffered while the broker is away. PayloadTooLarge, BusUnavailable (buffer full)."""
        ...

    async def request(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        """One question, one answer. NoResponders, BusTimeout, BusUnavailable, BusRefused, PayloadTooLarge,
        RemoteError."""
        ...

    async def subscribe(
        self,
        subject: str,
        handler: Handler,
        *,
        queue: str = "",
        limit: int = 65_536,
        on_dropped: Callable[[int], None] | None = None,
    ) -> Subscription:
        """Call `handler` for each message, one at a time and in order; in force when this returns.

        With `limit` messages waiting (the running one counts) further ones are dropped and counted; `on_dropped` is
        then called with their number, before the next message is handled.
        """
        ...

    async def respond(self, subject: str, responder: Responder, *, queue: str = "", limit: int = 256) -> Subscription:
        """Answer requests, each in a task of its own, at most `limit` at once; with 1 there are no tasks, which suits
        responders that never wait. An exception becomes the requester's RemoteError."""
        ...

    async def ensure_stream(
        self, name: str, subjects: list[str], *, max_age_s: float | None = None, last_per_subject: bool = False
    ) -> None:
        """Create the stream, or bring it to this definition."""
        ...

    async def store(self, subject: str, data: bytes, message_id: str, headers: Mapping[str, str] | None = None) -> int:
        """Publish into a stream, once per `message_id`; returns the sequence when the broker holds it.

        After any error the message may be stored all the same: call again with the same id. BusTimeout,
        BusUnavailable, BusRefused, PayloadTooLarge, NoResponders (no stream takes this subject), StreamError.
        """
        ...

    async def follow(self, subject: str, handler: Handler, *, start: Start, durable: str | None = None) -> Subscription:
        """Read a stream in order from `start` (an int: from that sequence on) and stay with it, over restarts of the
        broker.

        Without `durable` each message comes once and in order. With it the broker keeps the place: a message is
        acknowledged after its handler returned, and comes again if it did not; `start` counts only the first time.
        """
        ...

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Call after each reconnect, when subscriptions are in force again."""
        ...

    def on_failure(self, callback: Callable[[Exception], None]) -> None:
        """Call when a handler raised: an invariant is broken and the owner must end."""
        ...

    async def drain(self) -> None:
        """Stop taking messages, finish those received, send what is buffered."""
        ...

    async def close(self) -> None:
        """Give up everything at once."""
        ...
