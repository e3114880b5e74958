"""The blocking client of the own node's pool, for threads that have no event loop (SGLang's storage threads)."""

import socket
import threading
import time
from pathlib import Path

from schemas.codec import RejectedMessage, encode
from schemas.pool import AttachReply, AttachRequest, LocalCall
from services.local_call.frames import LENGTH, PoolRefused, PoolUnavailable, decode_reply, frame, frame_bytes
from services.local_call.verbs import ATTACH, ReplyT, RequestT, Verb

CALL_TIMEOUT_S = 1.0
RETRY_S = 0.25


class BlockingLocalClient:
    """Calls to the pool from any thread, one at a time over one connection that is made again when lost.

    While the pool is away a call fails at once, but for one try to connect every `retry_s`. When `attached` shows
    another incarnation than before, the arena must be mapped again.
    """

    def __init__(
        self, path: Path, attach: AttachRequest, *, timeout_s: float = CALL_TIMEOUT_S, retry_s: float = RETRY_S
    ) -> None:
        self._path, self._attach = path, attach
        self._timeout_s, self._retry_s = timeout_s, retry_s
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._number = 0
        self._not_before = 0.0
        self.attached: AttachReply | None = None
        """The pool's answer on the present connection; None while there is none."""

    def connect(self) -> AttachReply:
        """Connect and attach if not connected. PoolUnavailable, or PoolRefused when the pool will not have us."""
        with self._lock:
            return self._connected()

    def call(self, verb: Verb[RequestT, ReplyT], message: RequestT) -> ReplyT:
        """One call. PoolUnavailable without connection, on its loss and after `timeout_s`; PoolRefused on an error."""
        with self._lock:
            self._connected()
            return self._exchange(verb, message)

    def close(self) -> None:
        """Close the connection: the pool takes back what was allocated on it and not committed."""
        with self._lock:
            self._drop()

    def _connected(self) -> AttachReply:
        if self.attached is not None:
            return self.attached
        if time.monotonic() < self._not_before:
            raise PoolUnavailable(f"no pool at {self._path}")
        self._not_before = time.monotonic() + self._retry_s
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(self._timeout_s)
        try:
            self._socket.connect(str(self._path))
        except OSError as error:
            self._drop()
            raise PoolUnavailable(f"no pool at {self._path}: {error.strerror or error}") from error
        try:
            reply = self._exchange(ATTACH, self._attach)
            if not reply.ok:
                raise PoolRefused(reply.error)
        except PoolRefused:
            self._drop()
            raise
        self.attached = reply
        return reply

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = self.attached = None

    def _exchange(self, verb: Verb[RequestT, ReplyT], message: RequestT) -> ReplyT:
        self._number += 1
        data = frame(LocalCall(call=self._number, verb=verb.name, body=encode(message)))
        try:
            assert self._socket is not None
            self._socket.sendall(data)
            reply = decode_reply(self._receive(frame_bytes(self._receive(LENGTH.size))))
            if reply.call != self._number:
                raise RejectedMessage("schema", f"answer to call {reply.call}, asked was {self._number}")
            if reply.error:
                raise PoolRefused(reply.error)
            return verb.reply.decode(reply.body)
        except (OSError, EOFError, RejectedMessage) as error:
            self._drop()  # an answer may still come: only a new connection is in step again
            raise PoolUnavailable(f"{verb.name}: {error}") from error

    def _receive(self, size: int) -> bytes:
        assert self._socket is not None
        data = bytearray()
        while len(data) < size:
            part = self._socket.recv(size - len(data))
            if not part:
                raise EOFError("the pool closed the connection")
            data += part
        return bytes(data)
