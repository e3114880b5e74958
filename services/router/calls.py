"""One open request as its HTTP handler sees it: where it was placed, the tokens that came, how it ended."""

import asyncio
from collections.abc import Callable

from services.router.core.effects import End, Placed

_MESSAGE_BYTES, _TOKEN_BYTES = 200, 8
"""What a message of a stream takes on its way to the client, about: its frame, and each token in it."""


class Call:
    """Filled by the dispatcher, emptied by the handler. `backlog_bytes`: what a client has not taken yet, about.

    `uses_tools`: a tool call was seen in the answer so far. `at_once`: set by the handler of a stream that is under
    way; takes new tokens while the handler sleeps, and is False if they must wait for it.
    """

    __slots__ = ("_asleep", "_news", "_tokens", "at_once", "backlog_bytes", "end", "id", "placed", "uses_tools")

    def __init__(self, id: str) -> None:  # noqa: A002
        self.id = id
        self.placed: Placed | None = None
        self.end: End | None = None
        self.uses_tools = False
        self.backlog_bytes = 0
        self.at_once: Callable[[], bool] | None = None
        self._tokens: list[int] = []
        self._news = asyncio.Event()
        self._asleep = False

    def push(self, tokens: list[int]) -> None:
        """New tokens of the answer."""
        self._tokens += tokens
        self.backlog_bytes += _MESSAGE_BYTES + _TOKEN_BYTES * len(tokens)
        if not (self._asleep and self.at_once is not None and self.at_once()):
            self.nudge()

    def ended(self, end: End) -> None:
        """The request is over; nothing comes after this."""
        self.end = end
        self.nudge()

    @property
    def fresh(self) -> bool:
        """There are tokens to take, or the end."""
        return bool(self._tokens) or self.end is not None

    def nudge(self) -> None:
        """Wake the handler, whatever has come."""
        self._asleep = False
        self._news.set()

    async def news(self) -> None:
        """Wait until something is fresh, or a nudge."""
        self._asleep = not self._news.is_set()
        await self._news.wait()
        self._news.clear()

    def take(self) -> list[int]:
        """All tokens that have come since the last call."""
        tokens, self._tokens, self.backlog_bytes = self._tokens, [], 0
        return tokens
