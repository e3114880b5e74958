"""How one dialect puts an answer into words: what every shape is given, and what it must give."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from starlette.responses import Response

from services.router.core.effects import Outcome, Placed, Record
from services.router.core.failure import Failure
from services.router.text.pieces import Gathered, Piece

_JSON = msgspec.json.Encoder()
KEEP_ALIVE = b": keep-alive\n\n"


class Head(msgspec.Struct, frozen=True):
    """What every part of one answer repeats."""

    id: str
    created: int
    model: str


@dataclass(frozen=True, slots=True)
class Ending:
    """How an answer ended: `reason` is stop, length or tool_calls; `stop` the stop string that was found."""

    record: Record
    reason: str
    stop: str | None = None

    @classmethod
    def of(cls, record: Record, *, calls: bool, stop: str | None) -> "Ending":
        if record.outcome is Outcome.LENGTH:
            return cls(record, "length")
        return cls(record, "tool_calls" if calls and stop is None else "stop", stop)


class Shape(Protocol):
    """One answer in the words of its API. Bytes are whole server-sent events."""

    def opening(self, placed: Placed | None) -> bytes:
        """What a stream begins with."""
        ...

    def delta(self, pieces: Sequence[Piece], token_ids: list[int] | None) -> bytes: ...

    def closing(self, ending: Ending) -> bytes:
        """Why the answer ended, what it took, and the end of the stream."""
        ...

    def whole(self, answer: Gathered, ending: Ending, token_ids: list[int] | None) -> dict[str, Any]: ...

    def broken(self, failure: Failure) -> bytes:
        """A failure after the stream has begun."""
        ...

    def keep_alive(self) -> bytes:
        """What shows that a stream without news is alive."""
        ...

    def refusal(self, failure: Failure, request_id: str) -> Response:
        """A failure before anything was sent."""
        ...


def event(content: Mapping[str, Any], name: str | None = None) -> bytes:
    """One server-sent event."""
    data = b"data: " + _JSON.encode(content) + b"\n\n"
    return data if name is None else b"event: " + name.encode() + b"\n" + data


class TextFrame:
    """An event that is always the same but for its text. `sample` is that event for the text "\\0"."""

    def __init__(self, sample: bytes) -> None:
        self._before, found, self._after = sample.partition(_JSON.encode("\0"))
        if not found:
            raise ValueError(f"no text to replace in {sample!r}")

    def around(self, text: str) -> bytes:
        """The event that says `text`."""
        return self._before + _JSON.encode(text) + self._after
