"""Writing to a streamed response without a turn of the event loop: an extension of the ASGI scope."""

import weakref
from collections.abc import Mapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_EXTENSION = "services.direct"


class DirectWriter:
    """Writes parts of one response whose head has been sent by ASGI's `send`, while nobody is inside `send`.

    `send` waits when the client's buffer is full; this one says so beforehand.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def ready(self) -> bool:
        """Whether a part can be written now: the response is chunked, the client there, its buffer not full."""
        cycle = self._cycle
        return bool(cycle.chunked_encoding) and not (cycle.disconnected or cycle.flow.write_paused)

    def write(self, part: bytes) -> None:
        """Write a part that is not empty; only when `ready`."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))


def direct_extension(cycle: RequestResponseCycle) -> dict[str, dict[object, object]]:
    """What the scope of this response offers to the application. Weak: the response itself refers to its scope."""
    return {_EXTENSION: {"response": weakref.ref(cycle)}}


def direct_writer(scope: Mapping[str, Any]) -> DirectWriter | None:
    """The writer of this scope's response; None where the server offers none."""
    offered = scope.get("extensions", {}).get(_EXTENSION)
    cycle = None if offered is None else offered["response"]()
    return None if cycle is None else DirectWriter(cycle)
