"""The frames between the router and a process beside it, and that process's loop.

A frame is a length (u32, little-endian) and a msgpack array: requests are [number, verb, key, payload], answers
[number, error or nil, result]. The process ends when its standard input does.
"""

import importlib.util
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

Handle = Callable[[str, str, Any], Any]
LENGTH = struct.Struct("<I")


def serve(source: BinaryIO, target: BinaryIO, handle: Handle) -> None:
    """Until `source` ends; a request that fails is answered with its error."""
    while head := source.read(LENGTH.size):
        (length,) = LENGTH.unpack(head)
        number, verb, key, payload = msgspec.msgpack.decode(source.read(length))
        try:
            answer: list[Any] = [number, None, handle(verb, key, payload)]
        except Exception as error:  # noqa: BLE001 - a library's failure is the request's, never the process's
            answer = [number, f"{type(error).__name__}: {error}", None]
        data = msgspec.msgpack.encode(answer)
        target.write(LENGTH.pack(len(data)) + data)
        target.flush()


def without_gpu_packages() -> None:
    """Where a package that SGLang imports and only GPUs need is missing, its stand-in of our engine is found."""
    if importlib.util.find_spec("torchvision") is None:
        sys.path.append(str(Path(__file__).parents[2] / "engine" / "sglang" / "cpu_stubs"))


def run(handle: Handle) -> int:
    """Serve on the standard streams; whatever a library prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, answers, handle)
    return 0
