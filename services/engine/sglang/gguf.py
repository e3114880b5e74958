"""Read a GGUF file: metadata and weights as numpy arrays. Needs numpy only; knows the types small models ship in.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Weights = npt.NDArray[np.float32]
_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_BLOCK = 32
_Q4_1 = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("quants", "u1", (16,))])
_Q8_0 = np.dtype([("scale", "<f2"), ("quants", "i1", (32,))])


class BadGguf(ValueError):
    """The file is not a GGUF file that this reader understands; the text says what was found."""


def _f32(data: memoryview) -> Weights:
    return np.frombuffer(data, "<f4").astype(np.float32)


def _f16(data: memoryview) -> Weights:
    return np.frombuffer(data, "<f2").astype(np.float32)


def _q4_1(data: memoryview) -> Weights:
    blocks = np.frombuffer(data, _Q4_1)
    quants = np.concatenate([blocks["quants"] & 0x0F, blocks["quants"] >> 4], axis=1).astype(np.float32)
    scaled = quants * blocks["scale"].astype(np.float32)[:, None]
    return (scaled + blocks["minimum"].astype(np.float32)[:, None]).reshape(-1)


def _q8_0(data: memoryview) -> Weights:
    blocks = np.frombuffer(data, _Q8_0)
    return (blocks["quants"].astype(np.float32) * blocks["scale"].astype(np.float32)[:, None]).reshape(-1)


@dataclass(frozen=True)
class _Kind:
    block: int
    block_bytes: int
    decode: Callable[[memoryview], Weights]


_KINDS = {
    0: _Kind(1, 4, _f32),
    1: _Kind(1, 2, _f16),
    3: _Kind(_BLOCK, _Q4_1.itemsize, _q4_1),
    8: _Kind(_BLOCK, _Q8_0.itemsize, _q8_0),
}


@dataclass(frozen=True)
class _Tensor:
    shape: tuple[int, ...]
    kind: int
    offset: int


class Gguf:
    """One open file. `metadata` holds every key; `tensor(name)` decodes one weight, rows first; `names` lists them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self._view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        if bytes(self._view[:4]) != _MAGIC:
            raise BadGguf(f"{path}: starts with {bytes(self._view[:4])!r}, not {_MAGIC!r}")
        self._at = 4
        version, tensors, keys = self._take("<IQQ")
        if version not in (2, 3):
            raise BadGguf(f"{path}: GGUF version {version}, this reader knows 2 and 3")
        self.metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._string()
            self.metadata[key] = self._value(self._take("<I")[0])
        self._tensors = dict(self._tensor_info() for _ in range(tensors))
        alignment = int(self.metadata.get("general.alignment", 32))
        self._data = -(-self._at // alignment) * alignment

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def tensor(self, name: str) -> Weights:
        """The weight `name` as float32; KeyError if absent, BadGguf if its type is unknown."""
        info = self._tensors[name]
        kind = _KINDS.get(info.kind)
        if kind is None:
            raise BadGguf(f"{self.path}: tensor {name} has type {info.kind}, this reader knows {sorted(_KINDS)}")
        start = self._data + info.offset
        size = math.prod(info.shape) // kind.block * kind.block_bytes
        return kind.decode(self._view[start : start + size]).reshape(info.shape)

    def _take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._view, self._at)
        self._at += struct.calcsize(layout)
        return values

    def _string(self) -> str:
        (length,) = self._take("<Q")
        self._at += length
        return str(self._view[self._at - length : self._at], "utf-8")

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._take("<" + _SCALARS[kind])[0]
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise BadGguf(f"{self.path}: metadata type {kind} is unknown")
        item, count = self._take("<IQ")
        if item in _SCALARS:
            return list(self._take(f"<{count}{_SCALARS[item]}"))
        return [self._value(item) for _ in range(count)]

    def _tensor_info(self) -> tuple[str, _Tensor]:
        name = self._string()
        (dimensions,) = self._take("<I")
        shape = self._take(f"<{dimensions}Q")
        kind, offset = self._take("<IQ")
        return name, _Tensor(tuple(reversed(shape)), kind, offset)
