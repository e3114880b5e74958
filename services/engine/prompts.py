"""Prompts: their tokens, digests and media; what is too large for one message is read from their router in parts."""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

from schemas.block_key import block_digests, namespace_seed, short_key
from schemas.codec import RejectedMessage, encode
from schemas.kv import BlockMedia
from schemas.media import block_media
from schemas.serve import PROMPT_PART, TOKEN_BYTES, PromptPart, PromptRequest, ServeRequest
from schemas.subjects import Subjects
from services.bus import Bus, BusError
from services.engine.backend import BackendInfo

PART_TOKENS = 128 << 10
_FRAME_BYTES = 4096
"""What a message takes besides its tokens, with room to spare."""
_PART_S = 2.0
_TRIES = 3
MEDIA_BYTES = 256 << 20
"""What media kept for the next request that shows them may take."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of a leg, u32 little-endian, the digests of their full blocks, and the bytes of its media.

    `marks`: which of its blocks hold media, the one that its answer completes included.
    """

    tokens: bytes
    digests: tuple[bytes, ...]
    data: tuple[bytes, ...] = ()
    marks: tuple[BlockMedia, ...] = ()

    def marked(self) -> list[tuple[int, bytes]]:
        """The short keys of its full blocks with media, and these."""
        return [
            (short_key(self.digests[mark.block]), mark.sha256) for mark in self.marks if mark.block < len(self.digests)
        ]

    def completed(self, request: ServeRequest, answer: bytes, info: BackendInfo) -> list[tuple[int, bytes]]:
        """The same of the block that begins in the prompt and ends in its answer, as soon as that is long enough."""
        count, rest = len(self.digests), len(self.tokens) - len(self.digests) * info.block_size * TOKEN_BYTES
        if not self.marks or self.marks[-1].block != count:
            return []
        parent = self.digests[-1] if count else namespace_seed(request.extra_key, request.cache_salt)
        tail = self.tokens[len(self.tokens) - rest :] + answer[: (info.block_size + 1) * TOKEN_BYTES]
        found = block_digests(tail, info.block_size, parent, info.key_version)
        return [(short_key(found[0]), self.marks[-1].sha256)] if found else []


def prompt_of(request: ServeRequest, tokens: bytes, info: BackendInfo, data: tuple[bytes, ...] = ()) -> Prompt:
    """A prompt with its digests, in the namespace of its tenant and adapter."""
    seed = namespace_seed(request.extra_key, request.cache_salt)
    digests = tuple(block_digests(tokens, info.block_size, seed, info.key_version))
    marks = block_media(request.media, len(digests) + 1, info.block_size, info.key_version) if request.media else ()
    return Prompt(tokens, digests, data, tuple(marks))


class PromptLost(Exception):
    """The prompt cannot be had from its router; the text says why."""


class PromptReader:
    """Reads the prompt of a request that came without one. Media read before are not read again."""

    def __init__(self, bus: Bus, subjects: Subjects) -> None:
        self._bus, self._subjects = bus, subjects
        self._media: OrderedDict[bytes, bytes] = OrderedDict()
        self._media_bytes = 0

    async def read(self, request: ServeRequest) -> bytes:
        """All tokens of the prompt, u32 little-endian. PromptLost if the router does not have it or does not answer."""
        most = min(PART_TOKENS, (self._bus.max_payload_bytes - _FRAME_BYTES) // TOKEN_BYTES)
        prompt = bytearray()
        while (have := len(prompt) // TOKEN_BYTES) < request.prompt_tokens:
            count = min(most, request.prompt_tokens - have)
            question = PromptRequest(id=request.id, attempt=request.attempt, first=have, count=count)
            part = (await self._part(request.router, question)).tokens
            if not 0 < len(part) <= count * TOKEN_BYTES or len(part) % TOKEN_BYTES:
                raise PromptLost(f"router {request.router} gave {len(part)} bytes for {count} tokens of the prompt")
            prompt += part
        return bytes(prompt)

    async def read_media(self, request: ServeRequest) -> tuple[bytes, ...]:
        """The bytes of the prompt's media; PromptLost, also when they are not what their sha256 says."""
        return tuple([await self._medium(request, number) for number in range(len(request.media))])

    async def _medium(self, request: ServeRequest, number: int) -> bytes:
        medium = request.media[number]
        known = self._media.get(medium.sha256)
        if known is not None:
            self._media.move_to_end(medium.sha256)
            return known
        most, data = self._bus.max_payload_bytes - _FRAME_BYTES, bytearray()
        while len(data) < medium.size:
            count = min(most, medium.size - len(data))
            question = PromptRequest(
                id=request.id, attempt=request.attempt, first=len(data), count=count, medium=number
            )
            part = (await self._part(request.router, question)).data
            if not 0 < len(part) <= count:
                raise PromptLost(f"router {request.router} gave {len(part)} bytes for {count} of medium {number}")
            data += part
        if hashlib.sha256(data).digest() != medium.sha256:
            raise PromptLost(f"medium {number} of router {request.router} is not what its sha256 says")
        return self._remember(medium.sha256, bytes(data))

    def _remember(self, sha256: bytes, data: bytes) -> bytes:
        if sha256 not in self._media:
            self._media[sha256] = data
            self._media_bytes += len(data)
        while self._media_bytes > MEDIA_BYTES:
            self._media_bytes -= len(self._media.popitem(last=False)[1])
        return data

    async def _part(self, router: str, question: PromptRequest) -> PromptPart:
        failure = ""
        for _ in range(_TRIES):
            try:
                data = await self._bus.request(self._subjects.prompt(router), encode(question), _PART_S)
                part = PROMPT_PART.decode(data)
            except (BusError, RejectedMessage) as error:
                failure = str(error)
                continue
            if not part.known:
                raise PromptLost(f"router {router} does not know request {question.id} attempt {question.attempt}")
            return part
        raise PromptLost(f"prompt not read: {failure}")
