"""Messages between the engine service and the processes of its SGLang engine, over one Unix socket.

Frames are u32 little-endian length + MessagePack, as on the pool's socket. The worker (SGLang's main process) takes
requests; the scheduler (SGLang's rank 0) reports what happens to them, one `Step` per turn of its loop: it alone says
which tokens came and when a leg is out.
"""

import struct
from typing import Annotated

import msgspec

from schemas.kv import LocationChange
from schemas.media import Medium
from schemas.phase import Phase
from schemas.serve import Finish, RequestState, Sampling
from schemas.telemetry import Iteration

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 64 << 20
Count = Annotated[int, msgspec.Meta(ge=0)]


class _Frame(msgspec.Struct, frozen=True, kw_only=True, tag_field="k", omit_defaults=True):
    pass


class Hello(_Frame, frozen=True, kw_only=True, tag="hello"):
    """First frame of every process that connects; `role` is worker or scheduler."""

    role: str
    pid: int


class Submit(_Frame, frozen=True, kw_only=True, tag="submit"):
    """A leg enters. `rid` names it towards SGLang; `phase` is None in a plain engine. `media` stand in `tokens` as they
    are hashed; `data` are their bytes."""

    rid: str
    tokens: bytes
    sampling: Sampling
    phase: Phase | None = None
    room: int = 0
    rendezvous: str = ""
    session: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    media: list[Medium] = []
    data: list[bytes] = []


class Cancel(_Frame, frozen=True, kw_only=True, tag="cancel"):
    """A leg must stop; its end follows as usual."""

    rid: str


class DropDecodeCache(_Frame, frozen=True, kw_only=True, tag="drop"):
    """Free device blocks that only decode used."""


class Stop(_Frame, frozen=True, kw_only=True, tag="stop"):
    """To the worker: shut SGLang down and exit."""


class Ready(_Frame, frozen=True, kw_only=True, tag="ready"):
    """The worker's engine takes requests now."""

    eos_token_ids: list[int]
    max_context_tokens: Count


class Capacity(_Frame, frozen=True, kw_only=True, tag="capacity"):
    """The scheduler's KV pool as it was built; `pieces` names what a block consists of."""

    l1_tokens: Count
    max_running: Count
    block_bytes: Count
    ranks: Count
    pieces: str


class Refused(_Frame, frozen=True, kw_only=True, tag="refused"):
    """The worker could not hand this leg to SGLang, or SGLang answered with an error."""

    rid: str
    reason: str


class Notice(_Frame, frozen=True, kw_only=True, tag="notice"):
    """Something that whoever runs the engine should know."""

    text: str


class Answer(_Frame, frozen=True, kw_only=True, tag="answer"):
    """A plain engine's whole answer."""

    rid: str
    finish: Finish
    tokens: bytes
    cached_tokens: Count
    reason: str = ""


class Tokens(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [first, first + len) of a leg's answer, u32 little-endian."""

    rid: str
    first: Count
    tokens: bytes


class State(msgspec.Struct, frozen=True, array_like=True):
    """A leg went on; with `prefilling` come its cached tokens and how many of them came from host memory."""

    rid: str
    state: RequestState
    cached_tokens: Count = 0
    restored_tokens: Count = 0


class End(msgspec.Struct, frozen=True, array_like=True):
    """A leg is out of SGLang and holds nothing there."""

    rid: str
    finish: Finish
    reason: str
    cached_tokens: Count


class Step(_Frame, frozen=True, kw_only=True, tag="step"):
    """What one turn of the scheduler's loop brought. `entered`: legs that reached it, whose end will come from it.
    `used_tokens`: KV tokens in device memory, cached ones too."""

    used_tokens: Count
    entered: list[str] = []
    states: list[State] = []
    tokens: list[Tokens] = []
    ends: list[End] = []
    iterations: list[Iteration] = []
    changes: list[LocationChange] = []


Frame = Hello | Submit | Cancel | DropDecodeCache | Stop | Ready | Capacity | Refused | Notice | Answer | Step
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Frame)


class BadFrame(ValueError):
    """Bytes on the socket that are no frame of ours; the connection must end."""


def pack(frame: Frame) -> bytes:
    """One frame with its length."""
    body = _ENCODER.encode(frame)
    return LENGTH.pack(len(body)) + body


class Splitter:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Frames completed by `data`; BadFrame on anything else."""
        self._buffer += data
        frames: list[Frame] = []
        start = 0
        while len(self._buffer) - start >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._buffer, start)
            if size > MAX_FRAME_BYTES:
                raise BadFrame(f"frame of {size} bytes announced, at most {MAX_FRAME_BYTES} are taken")
            end = start + LENGTH.size + size
            if len(self._buffer) < end:
                break
            frames.append(_decoded(bytes(self._buffer[start + LENGTH.size : end])))
            start = end
        del self._buffer[:start]
        return frames


def _decoded(body: bytes) -> Frame:
    try:
        frame: Frame = _DECODER.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadFrame(f"no frame of the engine: {error}") from error
    return frame
