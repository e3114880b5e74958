"""An answer on its way to the client: one write per message of the engine, or one JSON document at the end."""

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from starlette.types import Message, Receive, Scope, Send

from services.router.api.errors import error_response, openai_error
from services.router.api.openai_response import DONE, Shape, event, finish_reason
from services.router.calls import Call
from services.router.core.effects import End, Placed
from services.router.text.stream import TextStream

KEEP_ALIVE = b": keep-alive\n\n"
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class CallControl(Protocol):
    """What an answer may do to its request."""

    def cancel(self, call: Call, reason: str) -> None: ...

    def stop(self, call: Call) -> None: ...


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds between keep-alives of a stream without tokens, and until a client that takes nothing is given up."""

    keep_alive_s: float
    idle_client_s: float


@dataclass(slots=True)
class Job:
    """One call and how it is to be answered. `stop_ids` end the answer and are not text."""

    call: Call
    shape: Shape
    text: TextStream
    stream: bool
    request_id: str
    include_usage: bool = False
    return_token_ids: bool = False
    stop_ids: frozenset[int] = frozenset()
    held: list[int] = field(default_factory=list)

    def words(self, tokens: list[int], end: End | None) -> str:
        """The text of new tokens; one that may have stopped the answer is held back until its end says so."""
        tokens, self.held = [*self.held, *tokens], []
        if end is None and tokens and tokens[-1] in self.stop_ids:
            self.held = [tokens.pop()]
        elif end is not None and end.trimmed:
            tokens = tokens[:-1]
        text = self.text.push(tokens)
        return text if end is None or self.text.stopped else text + self.text.flush()


class AnswerResponse:
    """The ASGI response of one call. A client that goes, or takes nothing, cancels its request."""

    def __init__(self, job: Job, control: CallControl, patience: Patience) -> None:
        self._job, self._control, self._patience = job, control, patience
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._watch(receive))
            try:
                await (self._stream(send) if self._job.stream else self._whole(send))
            except TimeoutError:
                self._control.cancel(self._job.call, "idle")
            finally:
                self._control.cancel(self._job.call, "gone")
                watching.cancel()

    async def _watch(self, receive: Receive) -> None:
        """A client that disconnects ends its request."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._control.cancel(self._job.call, "gone")

    async def _whole(self, send: Send) -> None:
        job, call = self._job, self._job.call
        ids: list[int] = []
        parts: list[str] = []
        while call.end is None:
            await call.news()
            tokens, end = call.take(), call.end
            ids += tokens
            parts.append(job.words(tokens, end))
            if job.text.stopped:
                self._control.stop(call)
        if call.end.failure is not None:
            await self._refuse(send, call.end)
            return
        token_ids = ids if job.return_token_ids else None
        body = msgspec.json.encode(job.shape.whole("".join(parts), call.end.record, token_ids))
        await self._send(send, self._start(b"application/json", len(body)))
        await self._send(send, {"type": "http.response.body", "body": body})

    async def _stream(self, send: Send) -> None:
        job, call = self._job, self._job.call
        while True:
            if not self._started:
                await self._first_news(send)
            else:
                await call.news()
            tokens, end = call.take(), call.end
            if end is not None and end.failure is not None:
                await self._break(send, end)
                return
            data = self._delta(tokens, end)
            if job.text.stopped and end is None:
                self._control.stop(call)
                end = call.end
            if end is not None:
                data += self._last(end)
            if data:
                await self._open(send)
                await self._send(send, {"type": "http.response.body", "body": data, "more_body": end is None})
            if end is not None:
                return

    async def _first_news(self, send: Send) -> None:
        """Wait for the first news; comments in between keep the connection from looking dead."""
        while True:
            try:
                async with asyncio.timeout(self._patience.keep_alive_s):
                    await self._job.call.news()
                return
            except TimeoutError:
                if self._job.call.placed is not None:
                    await self._open(send)
                    await self._send(send, {"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})

    def _delta(self, tokens: list[int], end: End | None) -> bytes:
        job = self._job
        text = job.words(tokens, end)
        if not text and not (job.return_token_ids and tokens):
            return b""
        return job.shape.delta(text, tokens if job.return_token_ids else None)

    def _last(self, end: End) -> bytes:
        job = self._job
        usage = job.shape.usage(end.record) if job.include_usage else b""
        return job.shape.closing(finish_reason(end.record)) + usage + DONE

    async def _open(self, send: Send) -> None:
        if self._started:
            return
        self._started = True
        await self._send(send, self._start(None, None))
        if opening := self._job.shape.opening():
            await self._send(send, {"type": "http.response.body", "body": opening, "more_body": True})

    async def _break(self, send: Send, end: End) -> None:
        """A failure: as a whole response while that is possible, else as the last event of the stream."""
        assert end.failure is not None
        if not self._started:
            await self._refuse(send, end)
            return
        body = event(openai_error(end.failure))
        await self._send(send, {"type": "http.response.body", "body": body, "more_body": False})

    async def _refuse(self, send: Send, end: End) -> None:
        assert end.failure is not None
        response = error_response(end.failure, self._job.request_id)
        await self._send(
            send, {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
        )
        await self._send(send, {"type": "http.response.body", "body": response.body})

    async def _send(self, send: Send, message: Message) -> None:
        async with asyncio.timeout(self._patience.idle_client_s):
            await send(message)

    def _start(self, kind: bytes | None, length: int | None) -> Message:
        headers = [(b"content-type", kind)] if kind else list(_STREAM_HEADERS)
        if length is not None:
            headers.append((b"content-length", b"%d" % length))
        headers.append((b"x-request-id", self._job.request_id.encode()))
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
