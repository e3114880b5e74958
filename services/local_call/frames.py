"""Frames on the pool's Unix socket: u32 little-endian length, then one MessagePack `LocalCall` or `LocalReply`."""

import struct
from typing import TypeVar

import msgspec

from schemas.codec import RejectedMessage
from schemas.pool import LocalCall, LocalReply

MAX_FRAME_BYTES = 16 << 20
LENGTH = struct.Struct("<I")
_ENCODER = msgspec.msgpack.Encoder()
_CALL = msgspec.msgpack.Decoder(LocalCall)
_REPLY = msgspec.msgpack.Decoder(LocalReply)
EnvelopeT = TypeVar("EnvelopeT", LocalCall, LocalReply)


class PoolUnavailable(Exception):
    """The pool of this node cannot be reached, or did not answer in time; whether the call took effect is unknown."""


class PoolRefused(Exception):
    """The pool answered with an error; the text is the pool's."""


def frame(envelope: LocalCall | LocalReply) -> bytes:
    """One frame; PoolRefused if it would be larger than the other side accepts."""
    body = _ENCODER.encode(envelope)
    if len(body) > MAX_FRAME_BYTES:
        raise PoolRefused(f"frame of {len(body)} bytes, at most {MAX_FRAME_BYTES} are taken")
    return LENGTH.pack(len(body)) + body


def frame_bytes(head: bytes) -> int:
    """Bytes that follow this length; RejectedMessage if they are more than a frame may have."""
    size: int = LENGTH.unpack(head)[0]
    if size > MAX_FRAME_BYTES:
        raise RejectedMessage("bytes", f"frame of {size} bytes announced, at most {MAX_FRAME_BYTES} are taken")
    return size


def decode_call(body: bytes) -> LocalCall:
    """A call; RejectedMessage if it is none."""
    return _decode(_CALL, body)


def decode_reply(body: bytes) -> LocalReply:
    """A reply; RejectedMessage if it is none."""
    return _decode(_REPLY, body)


def _decode(decoder: msgspec.msgpack.Decoder[EnvelopeT], body: bytes) -> EnvelopeT:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RejectedMessage("bytes", f"no local call or reply: {error}") from error


class FrameSplitter:
    """Cuts a byte stream into frame bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies completed by `data`; RejectedMessage once a frame is announced that is too large."""
        self._buffer += data
        bodies: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= LENGTH.size:
            size = frame_bytes(bytes(self._buffer[start : start + LENGTH.size]))
            end = start + LENGTH.size + size
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[start + LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return bodies
