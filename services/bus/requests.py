"""Questions under way: one inbox per connection, one future per question."""

import asyncio
import itertools
from secrets import token_hex

from nats.aio.msg import Msg

from services.bus.types import BusError, BusUnavailable

_NO_RESPONDERS = "503"


class Inbox:
    """Matches replies to questions; `prefix` is where replies come in (`<prefix>.<id>.<question>`)."""

    def __init__(self, prefix: str) -> None:
        self.prefix = f"{prefix}.{token_hex(8)}"
        self.pattern = f"{self.prefix}.*"
        self._numbers = itertools.count(1)
        self._open: dict[str, tuple[str, asyncio.Future[Msg]]] = {}

    def ask(self, subject: str) -> tuple[str, asyncio.Future[Msg]]:
        """A new reply subject and the future its answer will be set on."""
        future: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        reply = f"{self.prefix}.{next(self._numbers):x}"
        self._open[reply] = (subject, future)
        return reply, future

    def forget(self, reply: str) -> None:
        self._open.pop(reply, None)

    async def receive(self, message: Msg) -> None:
        """The callback of the inbox subscription; answers that nobody waits for any more are dropped."""
        _, future = self._open.get(message.subject, ("", None))
        if future is not None and not future.done():
            future.set_result(message)

    def fail(self, error: BusError, subject: str | None = None) -> None:
        """End all open questions, or those to one subject (letter case aside), with `error`."""
        for asked, future in self._open.values():
            if not future.done() and (subject is None or asked.casefold() == subject.casefold()):
                future.set_exception(error)

    def lost(self, away_s: float) -> None:
        """The broker has been away too long for any answer."""
        self.fail(BusUnavailable(f"the broker has been away for {away_s:g} s"))


def is_no_responders(message: Msg) -> bool:
    """Whether the broker itself answered that nobody listens there."""
    return status_of(message) == _NO_RESPONDERS and not message.data


def status_of(message: Msg) -> str | None:
    """The status with which the broker speaks for itself; None for an ordinary message."""
    return message.headers.get("Status") if message.headers else None
