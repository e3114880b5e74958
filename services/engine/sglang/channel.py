"""The scheduler's end of the engine's Unix socket: a loop without asyncio sends steps and looks for orders."""

import os
import socket

from services.engine.sglang.frames import Frame, Hello, Splitter, pack

_RECEIVE_BYTES = 65536
_SEND_BUFFER_BYTES = 4 << 20


class Channel:
    """One blocking connection to the backend. When the backend is gone this process has no reason to live."""

    def __init__(self, path: str, role: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._socket.connect(path)
        self._splitter = Splitter()
        self.send(Hello(role=role, pid=os.getpid()))

    def fileno(self) -> int:
        """For a poller that sleeps until there is an order."""
        return self._socket.fileno()

    def send(self, frame: Frame) -> None:
        """Send one frame; ends the process if the backend is gone."""
        try:
            self._socket.sendall(pack(frame))
        except OSError:
            os._exit(1)

    def poll(self) -> list[Frame]:
        """The orders that have come, without waiting; ends the process if the backend is gone."""
        try:
            data = self._socket.recv(_RECEIVE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError:
            os._exit(1)
        if not data:
            os._exit(1)
        return self._splitter.feed(data)
