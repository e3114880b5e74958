"""The pool's Unix socket: the engine and its storage threads call, one connection each, many calls in flight."""

import asyncio
import os
import socket
from pathlib import Path
from typing import cast

from schemas.codec import Message, RejectedMessage, encode
from schemas.pool import (
    AttachReply,
    AttachRequest,
    DeviceChanges,
    Empty,
    FetchRequest,
    LocalCall,
    LocalReply,
    LocateReply,
)
from services.kvpool.client_process import ClientProcess
from services.kvpool.fetch import Fetcher
from services.kvpool.metrics import PoolMetrics
from services.kvpool.store import Store
from services.local_call import (
    ALLOCATE,
    ATTACH,
    COMMIT,
    DEVICE,
    FETCH,
    LOCATE,
    RELEASE,
    VERBS,
    FrameSplitter,
    frame,
)
from services.local_call.frames import decode_call
from services.observe import RateLimitedLog

UNREAD_BYTES = 16 << 20
"""A client that lets this much pile up is cut off."""
_ROLES = ("engine", "storage")


class LocalServer:
    """Answers calls of this node's engine. A connection's allocations and pins end with it."""

    def __init__(
        self,
        path: Path,
        store: Store,
        fetcher: Fetcher,
        tasks: asyncio.TaskGroup,
        metrics: PoolMetrics,
        log: RateLimitedLog,
    ) -> None:
        self.path, self.store, self.fetcher = path, store, fetcher
        self.tasks, self.metrics, self.log = tasks, metrics, log
        self.connections: set[_Connection] = set()
        self.engine: _Connection | None = None
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen; OSError if another pool listens there."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _remove_dead(self.path)
        listening = socket.socket(socket.AF_UNIX)
        before = os.umask(0o177)
        try:
            listening.bind(str(self.path))
        finally:
            os.umask(before)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Connection(self), sock=listening)

    async def stop(self) -> None:
        """Close every connection and the socket."""
        if self._server is None:
            return
        self._server.close()
        for connection in list(self.connections):
            connection.close()
        self._server = None
        self.path.unlink(missing_ok=True)

    def attach(self, connection: "_Connection", request: AttachRequest) -> AttachReply:
        """Let a client in whose blocks are ours."""
        identity, layout = self.store.identity, self.store.arena.layout
        asked = (request.model, request.block_size, request.block_bytes, request.key_version)
        ours = (identity.model, identity.block_size, identity.block_bytes, identity.key_version)
        if asked != ours or request.role not in _ROLES:
            named = "model {} block_size={} block_bytes={} keys={}"
            error = f"{request.role!r} comes with {named.format(*asked)}; this pool holds {named.format(*ours)}"
            return AttachReply(ok=False, error=error)
        if request.role == "engine":
            self.store.engine_lost()  # the engine before, if there was one; this one reports its device memory anew
            self.engine = connection
        return AttachReply(
            ok=True,
            incarnation=self.store.core.log.incarnation,
            arena=str(self.store.path.absolute()),
            slots=layout.slots,
            slot_bytes=layout.slot_bytes,
        )

    def lost(self, connection: "_Connection") -> None:
        """A connection ended."""
        self.connections.discard(connection)
        self.fetcher.cancel_owner(connection.owner)
        if self.engine is connection:
            self.engine = None
            self.store.engine_lost()


class _Connection(asyncio.Protocol):
    """One client. Calls are answered at once, but for fetches, which run as tasks."""

    def __init__(self, server: LocalServer) -> None:
        self._server, self._store = server, server.store
        self.owner = server.store.new_owner()
        self._attached = False
        self._splitter = FrameSplitter()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._process = ClientProcess.of(self._transport)
        self._server.connections.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._splitter.feed(data):
                self._take(decode_call(body))
        except RejectedMessage as error:
            self._rejected("frame", error)
            self._transport.abort()  # nobody knows where the next frame begins
        except Exception as error:  # noqa: BLE001  a callback cannot end the process, a task can
            self._server.tasks.create_task(_raised(error))

    def connection_lost(self, error: Exception | None) -> None:
        self._server.lost(self)
        self._store.drop_owner(self.owner)
        if self._store.core.is_awaited(self.owner):
            self._process.on_end(lambda: self._store.end_owner(self.owner), self._store.core.aside_s)
        else:
            self._process.forget()

    def close(self) -> None:
        self._transport.abort()

    def _take(self, call: LocalCall) -> None:
        """Answer one call, now or in a task."""
        try:
            if call.verb not in VERBS:
                raise RejectedMessage("schema", f"verb {call.verb!r} is none of {', '.join(VERBS)}")
            if not self._attached and call.verb != ATTACH.name:
                raise RejectedMessage("schema", f"{call.verb} before attach")
            if call.verb == FETCH.name:
                request = FETCH.request.decode(call.body)
                self._server.tasks.create_task(self._fetch(call.call, request), name=f"fetch {request.id}")
                return
            reply = self._answer(call)
        except RejectedMessage as error:
            self._rejected(call.verb if call.verb in VERBS else "unknown", error)
            self._reply(LocalReply(call=call.call, error=str(error)))
            return
        self._server.metrics.calls.labels(call.verb, "socket", "ok").inc()
        self._reply(LocalReply(call=call.call, body=encode(reply)))

    def _answer(self, call: LocalCall) -> Message:
        store, body = self._store, call.body
        if call.verb == ALLOCATE.name:
            return store.allocate(ALLOCATE.request.decode(body), self.owner)
        if call.verb == COMMIT.name:
            return store.commit(COMMIT.request.decode(body), self.owner)
        if call.verb == LOCATE.name:
            return LocateReply(blocks=store.core.locate(LOCATE.request.decode(body).digests))
        if call.verb == RELEASE.name:
            self._server.fetcher.release(RELEASE.request.decode(body).id)
            return Empty()
        if call.verb == DEVICE.name:
            self._device(DEVICE.request.decode(body))
            return Empty()
        if call.verb == ATTACH.name:
            reply = self._server.attach(self, ATTACH.request.decode(body))
            self._attached = reply.ok
            return reply
        return store.core.status()

    def _device(self, message: DeviceChanges) -> None:
        if self._server.engine is not self:
            raise RejectedMessage("schema", "device changes come from the engine's newest connection only")
        self._store.device(message.changes)

    async def _fetch(self, call: int, request: FetchRequest) -> None:
        reply = await self._server.fetcher.fetch(request, self.owner)
        self._server.metrics.calls.labels(FETCH.name, "socket", "ok").inc()
        if not self._transport.is_closing():
            self._reply(LocalReply(call=call, body=encode(reply)))

    def _reply(self, reply: LocalReply) -> None:
        self._transport.write(frame(reply))
        if self._transport.get_write_buffer_size() > UNREAD_BYTES:
            self._server.log.warning("client_does_not_read", bytes=self._transport.get_write_buffer_size())
            self._transport.abort()

    def _rejected(self, verb: str, error: RejectedMessage) -> None:
        self._server.metrics.rejected.labels(f"socket.{verb}", error.reason).inc()
        self._server.metrics.calls.labels(verb, "socket", "rejected").inc()
        self._server.log.warning("rejected_call", kind=verb, verb=verb, error=str(error))


async def _raised(error: Exception) -> None:
    raise error


def _remove_dead(path: Path) -> None:
    """Remove a socket that a killed pool left; OSError if somebody listens on it."""
    if not path.exists():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
    raise OSError(f"another pool listens on {path}")
