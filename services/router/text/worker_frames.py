"""The frames between the router and a process beside it, and that process's loop.

A frame is a length (u32, little-endian) and a msgpack array: requests are [number, verb, key, payload], answers
[number, error or nil, result]. The process ends when its standard input does.
"""

import importlib.util
import os
import struct
import sys
from collections.abc import Callable
from io import BufferedIOBase
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

Handle = Callable[[str, str, Any], Any]
READ_BYTES = 1 << 16
_LENGTH = struct.Struct("<I")


def frame(message: list[Any]) -> bytes:
    """The bytes of one message."""
    data = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(data)) + data


class Frames:
    """Takes bytes as they come, gives the messages that are whole."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[list[Any]]:
        """The messages that end in `data`, in order."""
        buffer, found, begin = self._buffer, list[list[Any]](), 0
        buffer += data
        while begin + _LENGTH.size <= len(buffer):
            (length,) = _LENGTH.unpack_from(buffer, begin)
            end = begin + _LENGTH.size + length
            if end > len(buffer):
                break
            found.append(msgspec.msgpack.decode(buffer[begin + _LENGTH.size : end]))
            begin = end
        del buffer[:begin]
        return found


def serve(source: BufferedIOBase, target: BinaryIO, handle: Handle) -> None:
    """Until `source` ends; what came together is answered together. A request that fails is answered with its error."""
    frames = Frames()
    while data := source.read1(READ_BYTES):
        answers = [frame(_answer(handle, *request)) for request in frames.feed(data)]
        target.write(b"".join(answers))
        target.flush()


def _answer(handle: Handle, number: int, verb: str, key: str, payload: Any) -> list[Any]:
    try:
        return [number, None, handle(verb, key, payload)]
    except Exception as error:  # noqa: BLE001 - a library's failure is the request's, never the process's
        return [number, f"{type(error).__name__}: {error}", None]


def without_gpu_packages() -> bool:
    """Where a package that SGLang imports and only GPUs need is missing, its stand-in of our engine is found: true."""
    missing = importlib.util.find_spec("torchvision") is None
    if missing:
        sys.path.append(str(Path(__file__).parents[2] / "engine" / "sglang" / "cpu_stubs"))
    return missing


def run(handle: Handle) -> int:
    """Serve on the standard streams; whatever a library prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with os.fdopen(0, "rb", closefd=False) as requests:
        serve(requests, answers, handle)
    return 0
