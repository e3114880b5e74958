"""HTTP connections whose request heads are bounded: uvicorn's own protocol reads headers of any size.

A client that offers to change to another protocol is answered over HTTP/1.1, as the standard has it for a server that
does not change: uvicorn would lose the body (Java's HTTP client offers HTTP/2 with every request).
"""

from array import array
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.http_direct import direct_extension

HEAD_LIMIT_BYTES = 64 << 10
"""Request line and headers together, about: what harnesses send is below 8 KiB."""
_OFFERS = frozenset({b"upgrade", b"http2-settings"})


class HeadTooLarge(Exception):
    """Ends the reading of a request; the parser makes an invalid request of it."""


class _Parser(httptools.HttpRequestParser):
    """Gives what follows the head of an offer to its protocol, instead of leaving it unread."""

    def __init__(self, protocol: "BoundedHeads") -> None:
        super().__init__(protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)
        self._protocol = protocol

    def feed_data(self, data: "bytes | bytearray | memoryview[int] | array[int]") -> None:
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as stopped:
            self._protocol.decline(bytes(data[stopped.args[0] :]))


class BoundedHeads(HttpToolsProtocol):
    """Answers 431 and hangs up as soon as a head is too large, read to its end or not."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.parser = _Parser(self)
        self._in_head, self._offered = True, False
        self._head_bytes = self._fed_bytes = 0

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._fed_bytes += len(data)
            if self._fed_bytes > HEAD_LIMIT_BYTES and not self.transport.is_closing():
                self._refuse(self._fed_bytes)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = self._fed_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._offered = self.parser.should_upgrade() and self._get_upgrade() is not None
        if self._offered:
            return
        self._in_head = False
        scope = self.scope
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is scope:
            scope["extensions"] = direct_extension(self.cycle)

    def on_message_complete(self) -> None:
        """An offer is complete once it has been read again without it."""
        if not self._offered:
            super().on_message_complete()

    def decline(self, rest: bytes) -> None:
        """Read the request whose head has been read once more, as one that offers nothing; `rest` follows its head."""
        if not self._offered:
            return
        line = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        kept = [(name, _without_offer(value) if name == b"connection" else value) for name, value in self.headers]
        lines = [b"%b: %b\r\n" % header for header in kept if header[0] not in _OFFERS]
        self.parser = _Parser(self)
        self.parser.feed_data(b"".join([line, *lines, b"\r\n", rest]))

    def send_400_response(self, msg: str) -> None:
        """431 where our own limit is what made the request invalid."""
        if self._head_bytes > HEAD_LIMIT_BYTES:
            self._refuse(self._head_bytes)
        else:
            super().send_400_response(msg)

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > HEAD_LIMIT_BYTES:
            raise HeadTooLarge

    def _refuse(self, size: int) -> None:
        text = f"the request's head has {size} bytes or more, the limit is {HEAD_LIMIT_BYTES} bytes"
        error = {"message": text, "type": "request_too_large", "param": None, "code": "headers_too_large"}
        body = msgspec.json.encode({"error": error})
        head = (
            b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n" % len(body)
        )
        self.transport.write(head + body)
        self.transport.close()


def _without_offer(connection: bytes) -> bytes:
    kept = (option.strip() for option in connection.split(b","))
    return b", ".join(option for option in kept if option.lower() not in _OFFERS)
