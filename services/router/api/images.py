"""Image parts of all dialects: data URLs and base64, within their limits. Nothing is fetched from anywhere."""

import asyncio
import base64
import binascii
import hashlib
import re
from dataclasses import dataclass, field

from services.router.api.errors import ApiError, shown
from services.router.core.failure import TOO_LARGE, Failure, invalid
from services.router.text.layout import Image

_DATA_URL = re.compile(r"data:[^,;]*(?:;[^,;]*)*?;base64,", re.IGNORECASE)
_FETCHED = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
TEXT_ONLY = "this model takes text only"
NOT_INSTALLED = "images need the model's own processor, whose library is not installed here (extra `engine`)"
_ONLY_USERS = "images stand in messages of users and in results of tools only"


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Of one request: how many images, and the bytes of each."""

    count: int
    limit_bytes: int


@dataclass(slots=True)
class Images:
    """The images of one request, in order, still in base64. `limits` None: none is taken, `why_not` says why."""

    limits: ImageLimits | None = None
    why_not: str = TEXT_ONLY
    found: list[tuple[str, str]] = field(default_factory=list)

    @property
    def why_not_here(self) -> str:
        """Why no image is taken where none can stand."""
        return self.why_not if self.limits is None else _ONLY_USERS

    def add_url(self, url: object, kind: object, where: str) -> None:
        """OpenAI's image part; 400 names what is wrong with it."""
        self._check_taken(kind, where)
        if isinstance(url, dict):
            url = url.get("url")
        if not isinstance(url, str):
            raise ApiError(invalid(f"{where} has no image URL", where))
        match = _DATA_URL.match(url)
        if match is None:
            why = "images are not fetched, send them as data URL" if _FETCHED.match(url) else "a data URL is expected"
            raise ApiError(invalid(f"{where}: {shown(url)} is not base64 data: {why}", where, "unsupported_part"))
        self._add(url[match.end() :], where)

    def add_source(self, source: object, kind: object, where: str) -> None:
        """Anthropic's image block; 400 names what is wrong with it."""
        self._check_taken(kind, where)
        found = source if isinstance(source, dict) else {}
        if found.get("type") == "url":
            self.add_url(found.get("url"), kind, f"{where}.source")
            return
        if found.get("type") != "base64" or not isinstance(found.get("data"), str):
            text = f"{where}.source of type {shown(found.get('type'))} is not supported here, base64 is"
            raise ApiError(invalid(text, f"{where}.source", "unsupported_part"))
        self._add(found["data"], f"{where}.source")

    async def decoded(self) -> list[Image]:
        """The bytes of all images, decoded off the loop; 400 for what is not base64."""
        return await asyncio.to_thread(lambda: [_image(text, where) for text, where in self.found])

    def _check_taken(self, kind: object, where: str) -> None:
        if self.limits is None:
            refuse(where, kind, self.why_not)

    def _add(self, text: str, where: str) -> None:
        assert self.limits is not None
        size, limit = len(text) * 3 // 4, self.limits.limit_bytes
        if size > limit + 3:
            raise ApiError(_too_large(f"{where} has {size} bytes, the limit of an image is {limit} bytes", where))
        self.found.append((text, where))
        if len(self.found) > self.limits.count:
            text = f"{where} is image number {len(self.found)}, the limit is {self.limits.count} images a request"
            raise ApiError(invalid(text, where))


def refuse(where: str, kind: object, why: str) -> None:
    """400 for a part that is no text."""
    raise ApiError(invalid(f"{where} is of type {shown(kind)}: {why}", where, "unsupported_part"))


def _image(text: str, where: str) -> Image:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError(invalid(f"{where} is not base64: {error}", where)) from error
    return Image(data, hashlib.sha256(data).digest(), where)


def _too_large(text: str, where: str) -> Failure:
    return Failure(413, TOO_LARGE, text, where, "too_large")
