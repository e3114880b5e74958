"""The asyncio client of the own node's pool: stays connected, answers each call or says that it cannot."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

from schemas.codec import RejectedMessage, encode
from schemas.pool import AttachReply, AttachRequest, LocalCall
from services.local_call.frames import FrameSplitter, PoolRefused, PoolUnavailable, decode_reply, frame
from services.local_call.verbs import ATTACH, ReplyT, RequestT, Verb

CALL_TIMEOUT_S = 2.0
RETRY_S = (0.02, 1.0)
"""First and longest wait between two tries to connect; each is drawn from [half, whole)."""


class LocalClient:
    """Calls to the pool over one connection; any number may be in flight.

    Run `run` as a task: it connects, attaches, calls `on_attached` (report device memory there: a pool that was
    started anew knows nothing of it) and does so again whenever the connection was lost.
    """

    def __init__(
        self,
        path: Path,
        attach: AttachRequest,
        *,
        on_attached: Callable[[AttachReply], Awaitable[None]] | None = None,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        self._path, self._attach = path, attach
        self._on_attached, self._on_lost = on_attached, on_lost
        self._connection: _Connection | None = None
        self.attached: AttachReply | None = None
        """The pool's answer on the present connection; None while there is none."""
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Stay connected until cancelled. PoolRefused when the pool will not have us: another model or layout."""
        wait_s = RETRY_S[0]
        while True:
            try:
                await self._session()
                wait_s = RETRY_S[0]
            except PoolUnavailable:
                wait_s = min(2 * wait_s, RETRY_S[1])
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))

    async def _session(self) -> None:
        """One connection, from connect to loss. PoolUnavailable if it never came to be attached."""
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_unix_connection(_Connection, str(self._path))
        except OSError as error:
            raise PoolUnavailable(f"no pool at {self._path}: {error.strerror}") from error
        try:
            reply = await connection.call(ATTACH, self._attach, CALL_TIMEOUT_S)
            if not reply.ok:
                raise PoolRefused(reply.error)
            self._connection, self.attached = connection, reply
            if self._on_attached is not None:
                await self._on_attached(reply)
            self._changed.set()
            await connection.lost.wait()
        finally:
            was_attached = self.attached is not None
            self._connection = self.attached = None
            self._changed.clear()
            connection.close()
            if was_attached and self._on_lost is not None:
                self._on_lost()

    async def wait_attached(self, timeout_s: float) -> AttachReply:
        """The pool's attach reply once connected and `on_attached` has run; PoolUnavailable after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.attached is None or not self._changed.is_set():
                    await self._changed.wait()
        except TimeoutError:
            raise PoolUnavailable(f"no pool at {self._path} within {timeout_s} s") from None
        return self.attached

    async def call(self, verb: Verb[RequestT, ReplyT], message: RequestT, timeout_s: float = CALL_TIMEOUT_S) -> ReplyT:
        """One call. PoolUnavailable without connection, on its loss and after `timeout_s`; PoolRefused on an error."""
        if self._connection is None:
            raise PoolUnavailable(f"no pool at {self._path}")
        return await self._connection.call(verb, message, timeout_s)


class _Connection(asyncio.Protocol):
    """One connection: numbers calls and hands each reply to the call it answers."""

    def __init__(self) -> None:
        self._splitter = FrameSplitter()
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._next = 0
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._splitter.feed(data):
                reply = decode_reply(body)
                future = self._waiting.pop(reply.call, None)
                if future is None or future.done():
                    continue  # the caller gave up waiting
                if reply.error:
                    future.set_exception(PoolRefused(reply.error))
                else:
                    future.set_result(reply.body)
        except RejectedMessage as error:
            self._fail(f"the pool sent what is no reply: {error}")
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(f"connection to the pool lost: {error or 'closed'}")

    def _fail(self, text: str) -> None:
        self.lost.set()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(PoolUnavailable(text))
        self._waiting.clear()

    async def call(self, verb: Verb[RequestT, ReplyT], message: RequestT, timeout_s: float) -> ReplyT:
        if self.lost.is_set():
            raise PoolUnavailable("connection to the pool lost")
        self._next += 1
        number = self._next
        data = frame(LocalCall(call=number, verb=verb.name, body=encode(message)))
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._transport.write(data)
        try:
            async with asyncio.timeout(timeout_s):
                body = await future
            return verb.reply.decode(body)
        except TimeoutError:
            raise PoolUnavailable(f"no answer to {verb.name} within {timeout_s} s") from None
        except RejectedMessage as error:
            raise PoolUnavailable(f"the answer to {verb.name} is none: {error}") from error
        finally:
            self._waiting.pop(number, None)

    def close(self) -> None:
        self._transport.abort()
