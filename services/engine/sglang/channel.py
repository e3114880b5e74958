"""The scheduler's end of the engine's Unix socket: a loop without asyncio that tells what happened."""

import os
import socket

from services.engine.sglang.frames import Frame, Hello, pack

_SEND_BUFFER_BYTES = 4 << 20


class Channel:
    """One blocking connection to the backend. When the backend is gone this process has no reason to live."""

    def __init__(self, path: str, role: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._socket.connect(path)
        self.send(Hello(role=role, pid=os.getpid()))

    def send(self, frame: Frame) -> None:
        """Send one frame; ends the process if the backend is gone."""
        try:
            self._socket.sendall(pack(frame))
        except OSError:
            os._exit(1)
