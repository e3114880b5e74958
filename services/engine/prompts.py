"""Prompts: their tokens and digests; those too large for one message are read from their router in parts."""

from dataclasses import dataclass

from schemas.block_key import block_digests, namespace_seed
from schemas.codec import RejectedMessage, encode
from schemas.serve import PROMPT_PART, TOKEN_BYTES, PromptRequest, ServeRequest
from schemas.subjects import Subjects
from services.bus import Bus, BusError
from services.engine.backend import BackendInfo

PART_TOKENS = 128 << 10
_FRAME_BYTES = 4096
"""What a message takes besides its tokens, with room to spare."""
_PART_S = 2.0
_TRIES = 3


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of a leg, u32 little-endian, and the digests of their full blocks."""

    tokens: bytes
    digests: tuple[bytes, ...]


def prompt_of(request: ServeRequest, tokens: bytes, info: BackendInfo) -> Prompt:
    """A prompt with its digests, in the namespace of its tenant and adapter."""
    seed = namespace_seed(request.extra_key, request.cache_salt)
    return Prompt(tokens, tuple(block_digests(tokens, info.block_size, seed, info.key_version)))


class PromptLost(Exception):
    """The prompt cannot be had from its router; the text says why."""


class PromptReader:
    """Reads the prompt of a request that came without one."""

    def __init__(self, bus: Bus, subjects: Subjects) -> None:
        self._bus, self._subjects = bus, subjects

    async def read(self, request: ServeRequest) -> bytes:
        """All tokens of the prompt, u32 little-endian. PromptLost if the router does not have it or does not answer."""
        most = min(PART_TOKENS, (self._bus.max_payload_bytes - _FRAME_BYTES) // TOKEN_BYTES)
        prompt = bytearray()
        while (have := len(prompt) // TOKEN_BYTES) < request.prompt_tokens:
            count = min(most, request.prompt_tokens - have)
            question = PromptRequest(id=request.id, attempt=request.attempt, first=have, count=count)
            part = await self._part(request.router, question)
            if not 0 < len(part) <= count * TOKEN_BYTES or len(part) % TOKEN_BYTES:
                raise PromptLost(f"router {request.router} gave {len(part)} bytes for {count} tokens of the prompt")
            prompt += part
        return bytes(prompt)

    async def _part(self, router: str, question: PromptRequest) -> bytes:
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
            return part.tokens
        raise PromptLost(f"prompt not read: {failure}")
