"""Reading a request body: within its limit, as one JSON object, with the field at fault named."""

import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from services.router.api.errors import ApiError, shown
from services.router.core.failure import TOO_LARGE, Failure, invalid

StructT = TypeVar("StructT", bound=msgspec.Struct)
_PATH = re.compile(r"(.*?) - at `\$\.?([^`]*)`")


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The whole body; 413 above `limit_bytes`, announced or real. ClientDisconnect when the client goes."""
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and int(announced) > limit_bytes:
        raise ApiError(_too_large(int(announced), limit_bytes))
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit_bytes:
            raise ApiError(_too_large(size, limit_bytes))
        parts.append(part)
    return b"".join(parts)


def decode_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object; 400 otherwise."""
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError(invalid(f"the body is not a JSON object: {error}")) from error


def convert(raw: dict[str, Any], kind: type[StructT]) -> StructT:
    """The fields of a request; 400 names the field, what was expected and what was given."""
    try:
        return msgspec.convert(raw, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ApiError(_misfit(raw, str(error))) from error


def _misfit(raw: dict[str, Any], text: str) -> Failure:
    found = _PATH.match(text)
    if found is None:
        return invalid(text)
    what, path = found.groups()
    value: Any = raw
    for key in re.findall(r"[^.\[\]]+", path):
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list) and key.isdigit():
            value = value[int(key)]
    return invalid(f"{path}: {what}; got {shown(value, 80)}", path)


def _too_large(size: int, limit: int) -> Failure:
    return Failure(413, TOO_LARGE, f"the body has {size} bytes or more, the limit is {limit} bytes", code="too_large")


__all__ = ["ClientDisconnect", "convert", "decode_object", "read_body"]
