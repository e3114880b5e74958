"""Bytes to messages and back: MessagePack maps, one version number, one error type."""

from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta

VERSION = 1
"""The `v` this code writes and reads. New keys do not raise it; a changed meaning does."""


UnixTime = Annotated[float, Meta(ge=-1e11, le=1e11)]
"""Seconds since 1970 by the sender's clock: finite, and not to be trusted for more than showing it."""

Seconds = Annotated[float, Meta(ge=0, le=1e9)]
"""A duration: finite and not negative."""

LARGEST_SMALL_COUNT = 2**31 - 1
LARGEST_COUNT = 2**53 - 1
LARGEST_INT = 2**63 - 1

SmallCount = Annotated[int, Meta(ge=0, le=LARGEST_SMALL_COUNT)]
"""How many, where anybody may say it: one more of it, or so many blocks in tokens, is still a `Count`."""

Count = Annotated[int, Meta(ge=0, le=LARGEST_COUNT)]
"""How many, or a place in an order: every reader of JSON keeps it exactly, and the sum of a thousand fits 64 bits."""

Positive = Annotated[int, Meta(ge=1, le=LARGEST_COUNT)]
"""A `Count` that is not 0."""

Incarnation = Annotated[int, Meta(ge=0, le=LARGEST_INT)]
"""Which life of a process; of pools, engines and directories a later one is higher."""


class RejectedMessage(ValueError):
    """Bytes that are not the message they should be; `reason` is `version`, `schema`, `bytes` or `tenant`."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """What every message carries: its version. Unknown keys are ignored, so additions are safe."""

    v: int = VERSION


class _Envelope(msgspec.Struct):
    v: int


_ENCODER = msgspec.msgpack.Encoder()
_ENVELOPE = msgspec.msgpack.Decoder(_Envelope)
_JSON_ENVELOPE = msgspec.json.Decoder(_Envelope)
MessageT = TypeVar("MessageT", bound=Message)


def encode(message: Message) -> bytes:
    """Encode a message as one MessagePack map."""
    return _ENCODER.encode(message)


class Decoder(Generic[MessageT]):
    """Decode one message type from MessagePack (or JSON); raises `RejectedMessage` and nothing else."""

    def __init__(self, kind: type[MessageT]) -> None:
        self.kind = kind
        self._msgpack = msgspec.msgpack.Decoder(kind)
        self._json = msgspec.json.Decoder(kind)

    def decode(self, data: bytes) -> MessageT:
        """Decode MessagePack bytes."""
        return self._checked(self._msgpack, _ENVELOPE, data)

    def decode_json(self, data: bytes) -> MessageT:
        """Decode JSON bytes (accepted on `branch.event` only)."""
        return self._checked(self._json, _JSON_ENVELOPE, data)

    def _checked(self, decoder: Any, envelope: Any, data: bytes) -> MessageT:
        try:
            message: MessageT = decoder.decode(data)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError) as error:
            raise self._rejected(envelope, data, error) from error
        if message.v != VERSION:
            raise self._unknown_version(message.v)
        return message

    def _rejected(self, envelope: Any, data: bytes, error: Exception) -> RejectedMessage:
        """A message of another version may not even fit the schema: name the version then, not the misfit."""
        try:
            version = envelope.decode(data).v
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError):
            version = VERSION
        if version != VERSION:
            return self._unknown_version(version)
        reason = "schema" if isinstance(error, msgspec.ValidationError) else "bytes"
        return RejectedMessage(reason, f"{self.kind.__name__}: {error}")

    def _unknown_version(self, version: int) -> RejectedMessage:
        return RejectedMessage("version", f"{self.kind.__name__}: version {version}, this service reads {VERSION}")
