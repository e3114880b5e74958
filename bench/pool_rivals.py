"""What the machine can do at all: memcpy, and one blocking socket between two processes, over the same memory."""

import os
import socket
import subprocess
import sys
import time

import numpy as np

MEGABYTE = 1 << 20
SEND = """
import os, socket, sys
connection = socket.socket(fileno=int(sys.argv[1]))
size, span = int(sys.argv[2]), int(sys.argv[3])
view = memoryview(bytearray(os.urandom(1 << 20)) * (span >> 20))
while wanted := connection.recv(8):
    at = int.from_bytes(wanted, "little")
    connection.sendall(view[at : at + size])
"""


class Memcpy:
    """Copies `size` bytes in pieces of 1 MB from one of many places to one of a few, as a fetch does."""

    def __init__(self, size: int, sources: int, targets: int) -> None:
        self._size, self._sources, self._targets = size, sources, targets
        self._source = np.frombuffer(os.urandom(MEGABYTE) * (sources * size // MEGABYTE), np.uint8)
        self._target = np.ones(targets * size, np.uint8)

    def seconds(self, turn: int) -> float:
        source = self._source[turn % self._sources * self._size :][: self._size]
        target = self._target[turn % self._targets * self._size :][: self._size]
        began = time.perf_counter()
        for at in range(0, self._size, MEGABYTE):
            np.copyto(target[at : at + MEGABYTE], source[at : at + MEGABYTE])
        return time.perf_counter() - began


class RawSocket:
    """Asks another process for `size` bytes over a loopback TCP connection and reads them with `recv_into`."""

    def __init__(self, size: int, sources: int, targets: int) -> None:
        self._size, self._sources, self._targets = size, sources, targets
        self._target = memoryview(bytearray(targets * size))
        with socket.create_server(("127.0.0.1", 0)) as listening:
            near = socket.create_connection(listening.getsockname())
            far, _ = listening.accept()
        command = [sys.executable, "-c", SEND, str(far.fileno()), str(size), str(sources * size)]
        self._process = subprocess.Popen(command, pass_fds=[far.fileno()])
        far.close()
        self._connection = near

    def seconds(self, turn: int) -> float:
        target = self._target[turn % self._targets * self._size :][: self._size]
        began = time.perf_counter()
        self._connection.sendall((turn % self._sources * self._size).to_bytes(8, "little"))
        received = 0
        while received < self._size:
            received += self._connection.recv_into(target[received:])
        return time.perf_counter() - began

    def close(self) -> None:
        self._connection.close()
        self._process.wait()
