"""An answer on its way to the client: one write per message of the engine, or one JSON document at the end.

The words of a stream that is under way are written where they come in, as long as the client takes them; its handler
sleeps meanwhile. It is woken for all else: the beginning, the end, a client whose buffer is full, keep-alives.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec
from starlette.types import Message, Receive, Scope, Send

from services.http_direct import DirectWriter, direct_writer
from services.router.api.reader import PlainReader, Reader
from services.router.api.shape import Ending, Shape
from services.router.api.vigil import Patience, Vigil
from services.router.calls import Call
from services.router.core.effects import End, Placed
from services.router.core.failure import INTERNAL, Failure
from services.router.text.pieces import Gathered, Piece
from services.router.text.worker_process import WorkerFailed

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class CallControl(Protocol):
    """What an answer may do to its request."""

    def cancel(self, call: Call, reason: str) -> None: ...

    def stop(self, call: Call) -> None: ...


@dataclass(slots=True)
class Job:
    """One call and how it is to be answered. `on_answer` gets a complete answer's tokens; `read_tokens` counts those
    read so far: what is kept of them is the core's."""

    call: Call
    shape: Shape
    reader: Reader
    stream: bool
    request_id: str
    return_token_ids: bool = False
    on_answer: Callable[[list[int]], None] = lambda tokens: None
    read_tokens: int = 0

    def ids(self, end: End) -> list[int]:
        """The tokens of a complete answer."""
        return list(end.tokens[: self.read_tokens])


@dataclass(frozen=True, slots=True)
class _News:
    """What one message of the engine brought. `failure`: the answer cannot go on."""

    pieces: list[Piece]
    tokens: list[int]
    end: End | None
    failure: Failure | None = None


class AnswerResponse:
    """The ASGI response of one call. A client that goes, or takes nothing, cancels its request."""

    def __init__(self, job: Job, control: CallControl, patience: Patience) -> None:
        self._job, self._control = job, control
        self._vigil = Vigil(patience, job.call.nudge)
        self._started = False
        self._direct: DirectWriter | None = None
        self._error: Exception | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._direct = direct_writer(scope)
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._watch(receive))
            tasks.create_task(self._answer(send, watching))

    async def _answer(self, send: Send, watching: "asyncio.Task[None]") -> None:
        """In a task of its own: to wake up costs the more, the more coroutines wait for one another."""
        try:
            async with self._vigil:
                await (self._stream(send) if self._job.stream else self._whole(send))
        except TimeoutError:
            self._control.cancel(self._job.call, "idle")
        finally:
            self._job.call.at_once = None
            self._control.cancel(self._job.call, "gone")
            self._job.reader.close()
            watching.cancel()

    async def _watch(self, receive: Receive) -> None:
        """A client that disconnects ends its request."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._control.cancel(self._job.call, "gone")

    async def _read(self) -> _News:
        """What has come since the last time. A complete answer ends its request, whatever the engine would add."""
        job, call = self._job, self._job.call
        tokens, end = call.take(), call.end
        job.read_tokens += len(tokens)
        if end is not None and end.failure is not None:
            return _News([], tokens, end, end.failure)
        try:
            pieces = await job.reader.read(tokens, end)
        except WorkerFailed as error:
            return _News([], tokens, end, Failure(500, INTERNAL, f"the answer could not be parsed: {error}"))
        call.uses_tools = job.reader.calls > 0
        if job.reader.stopped and end is None:
            self._control.stop(call)
            end = call.end
        if end is not None and end.record.outcome.answered:
            job.on_answer(job.ids(end))
        return _News(pieces, tokens, end)

    def _ending(self, end: End) -> Ending:
        reader = self._job.reader
        return Ending.of(end.record, calls=reader.calls > 0, stop=reader.stop)

    async def _whole(self, send: Send) -> None:
        job = self._job
        pieces: list[Piece] = []
        end: End | None = None
        while end is None:
            await job.call.news()
            news = await self._read()
            if news.failure is not None:
                await self._refuse(send, news.failure)
                return
            pieces += news.pieces
            end = news.end
        token_ids = job.ids(end) if job.return_token_ids else None
        body = msgspec.json.encode(job.shape.whole(Gathered.of(pieces), self._ending(end), token_ids))
        await self._send(send, self._start(b"application/json", len(body)))
        await self._send(send, {"type": "http.response.body", "body": body})

    async def _stream(self, send: Send) -> None:
        job = self._job
        end: End | None = None
        while end is None:
            await job.call.news()
            self._vigil.heard()
            if self._error is not None:
                raise self._error
            if not job.call.fresh:
                await self._keep_alive(send)
                continue
            news = await self._read()
            if news.failure is not None:
                await self._break(send, news.failure)
                return
            end = news.end
            ids = news.tokens if job.return_token_ids else None
            speaks = bool(news.pieces or ids)
            if speaks or end is not None:
                await self._open(send)
            data = job.shape.delta(news.pieces, ids) if speaks else b""
            if end is not None:
                data += job.shape.closing(self._ending(end))
            if data:
                await self._part(send, data, more=end is None)

    def _at_once(self, direct: DirectWriter, reader: PlainReader) -> bool:
        """Write the words that have just come, without the handler; False if they must wait for it."""
        job = self._job
        if not direct.ready:
            return False
        try:
            tokens = job.call.take()
            job.read_tokens += len(tokens)
            pieces = reader.pieces(tokens, None)
            ids = tokens if job.return_token_ids else None
            if pieces or ids:
                direct.write(job.shape.delta(pieces, ids))
        except Exception as error:  # noqa: BLE001 - the handler raises it: what fails is this call alone
            self._error = error
            return False
        self._vigil.heard()
        if reader.stopped:
            self._control.stop(job.call)
        return True

    async def _keep_alive(self, send: Send) -> None:
        """A sign of life keeps the connection from looking dead, once the request has a place."""
        if self._job.call.placed is not None:
            await self._open(send)
            body = self._job.shape.keep_alive()
            await self._send(send, {"type": "http.response.body", "body": body, "more_body": True})

    async def _open(self, send: Send) -> None:
        if self._started:
            return
        self._started = True
        await self._send(send, self._start(None, None))
        if opening := self._job.shape.opening(self._job.call.placed):
            await self._send(send, {"type": "http.response.body", "body": opening, "more_body": True})
        if self._direct is not None and isinstance(self._job.reader, PlainReader):
            self._job.call.at_once = partial(self._at_once, self._direct, self._job.reader)

    async def _part(self, send: Send, data: bytes, *, more: bool) -> None:
        if more and self._direct is not None and self._direct.ready:
            self._direct.write(data)
        else:
            await self._send(send, {"type": "http.response.body", "body": data, "more_body": more})

    async def _break(self, send: Send, failure: Failure) -> None:
        """A failure: as a whole response while that is possible, else as the last event of the stream."""
        if not self._started:
            await self._refuse(send, failure)
            return
        body = self._job.shape.broken(failure)
        await self._send(send, {"type": "http.response.body", "body": body, "more_body": False})

    async def _refuse(self, send: Send, failure: Failure) -> None:
        response = self._job.shape.refusal(failure, self._job.request_id)
        await self._send(
            send, {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
        )
        await self._send(send, {"type": "http.response.body", "body": response.body})

    async def _send(self, send: Send, message: Message) -> None:
        self._vigil.sending()
        await send(message)
        self._vigil.sent()

    def _start(self, kind: bytes | None, length: int | None) -> Message:
        headers = [(b"content-type", kind)] if kind else list(_STREAM_HEADERS)
        if length is not None:
            headers.append((b"content-length", b"%d" % length))
        request_id = self._job.request_id.encode()
        headers += [(b"x-request-id", request_id), (b"request-id", request_id)]
        if self._job.call.placed is not None:
            headers += _placed_headers(self._job.call.placed)
        return {"type": "http.response.start", "status": 200, "headers": headers}


def _placed_headers(placed: Placed) -> list[tuple[bytes, bytes]]:
    """What was predicted when the request was placed. Branch ids that no header can carry are left out."""
    headers = [
        (b"x-ei-prefill-node", placed.prefill_node.encode()),
        (b"x-ei-decode-node", placed.decode_node.encode()),
        (b"x-ei-cached-tokens", b"%d" % placed.cached_tokens),
    ]
    if placed.branch is not None:
        if placed.branch.isascii():
            headers.append((b"x-ei-branch-id", placed.branch.encode()))
        headers.append((b"x-ei-branch-version", b"%d" % (placed.version or 0)))
    return headers
