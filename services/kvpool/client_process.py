"""The process at the other end of a Unix socket, and its end."""

import asyncio
import os
import select
import socket
import struct
from collections.abc import Callable

_CREDENTIALS = struct.Struct("3i")


class ClientProcess:
    """Tells when a client's process is gone: only then does it write no more into the arena, whatever its socket says.

    A process that cannot be watched (another pid namespace, an old kernel) never seems to end.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def of(cls, transport: asyncio.Transport) -> "ClientProcess":
        """The process that connected."""
        connection: socket.socket = transport.get_extra_info("socket")
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, _, _ = _CREDENTIALS.unpack(raw)
        try:
            return cls(os.pidfd_open(pid) if pid > 0 else None)
        except OSError:
            return cls(None)

    def on_end(self, callback: Callable[[], None], within_s: float) -> None:
        """Call back once when the process has ended, unless that takes longer than `within_s`."""
        if self._descriptor is None:
            return
        ended = select.poll()
        ended.register(self._descriptor, select.POLLIN)
        if ended.poll(0):
            self.forget()
            callback()
            return
        loop = asyncio.get_running_loop()
        loop.add_reader(self._descriptor, self._ended, callback)
        self._timer = loop.call_later(within_s, self.forget)

    def _ended(self, callback: Callable[[], None]) -> None:
        self.forget()
        callback()

    def forget(self) -> None:
        """Watch no longer."""
        if self._timer is not None:
            self._timer.cancel()
        if self._descriptor is not None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None
