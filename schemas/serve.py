"""Requests between router and engines, and the hand-off between two engines."""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from schemas.codec import LARGEST_INT, Count, Decoder, Incarnation, Message, Positive, SmallCount, UnixTime
from schemas.media import Medium
from schemas.phase import Phase

Room = Annotated[int, Meta(ge=0, le=LARGEST_INT)]
Token = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=LARGEST_INT)]
RequestId = Annotated[str, Meta(min_length=1, max_length=128)]
TOKEN_BYTES = 4


class RequestState(StrEnum):
    """The life of a request, in order; the router's state machine and the engines' reports use these words."""

    RECEIVED = "received"
    MATCHED = "matched"
    PLACED = "placed"
    QUEUED = "queued"
    FETCHING = "fetching"
    READY = "ready"
    RESERVED = "reserved"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    DECODING = "decoding"
    ENDED = "ended"


class Finish(StrEnum):
    """Why a leg ended: stop and length are answers; requeued asks the router to place the request again."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    REQUEUED = "requeued"
    HANDED_OFF = "handed_off"
    ERROR = "error"


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose tokens; `stop_token_ids` end the answer and are part of it."""

    max_new_tokens: Positive
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Positive | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0)] = 1.0
    seed: Seed | None = None
    stop_token_ids: list[Token] = []
    ignore_eos: bool = False
    min_new_tokens: Count = 0


class FetchSource(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks [first, last) of the prompt lie in the host memory of `node`."""

    node: str
    first: Count
    last: Count


class ServeRequest(Message, frozen=True, kw_only=True):
    """`serve`: one leg of one attempt. Idempotent by (id, attempt, phase); the same attempt with another `peer` or
    `room` redirects a prefill leg that has not been handed off yet.

    `tokens`: u32 little-endian prompt; empty when it exceeds one message, then `prompt_tokens` of them are read from
    subject `prompt.<router>`. `deadline_s` is relative to receipt: work not begun by then is given back. `resume`: a
    short prefill for a node that serves decode, because the branch's KV lies on its device; its other leg is there too.
    A prompt with `media`, whose tokens are those it is hashed as, is read from the router together with their bytes.
    """

    id: RequestId
    attempt: Positive
    phase: Phase
    router: str
    peer: str
    room: Room
    prompt_tokens: Positive
    sampling: Sampling
    tokens: bytes = b""
    deadline_s: Annotated[float, Meta(gt=0, le=1e9)] = 3600.0
    fetch: list[FetchSource] = []
    branch: str | None = None
    version: SmallCount | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    cached_tokens: Count = 0
    traceparent: str | None = None
    resume: bool = False
    media: list[Medium] = []

    def __post_init__(self) -> None:
        if self.tokens and len(self.tokens) != self.prompt_tokens * TOKEN_BYTES:
            raise ValueError(f"{len(self.tokens)} bytes of tokens, {self.prompt_tokens} tokens were announced")
        if self.phase is Phase.BOTH:
            raise ValueError("a leg is of phase prefill or decode")


class ServeReply(Message, frozen=True, kw_only=True):
    """Accepted with the queue position, or refused with a reason (phase, full, context, draining, unknown)."""

    accepted: bool
    epoch: Count
    position: Count = 0
    reason: str = ""
    text: str = ""


class LegUpdate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """News of one leg: a new state, tokens, or its end. `seq` is the index of the first of `tokens` in the answer.

    An end without tokens says in `seq` how many tokens the answer has, so that a lost message before it is noticed.
    """

    id: str
    attempt: Positive
    phase: Phase
    state: RequestState | None = None
    seq: Count = 0
    tokens: bytes = b""
    finish: Finish | None = None
    reason: str = ""
    cached_tokens: Count | None = None
    restored_tokens: Count | None = None
    stop_token: Token | None = None

    def __post_init__(self) -> None:
        if len(self.tokens) % TOKEN_BYTES:
            raise ValueError(f"{len(self.tokens)} bytes of tokens are not a multiple of {TOKEN_BYTES}")


class ReplyBatch(Message, frozen=True, kw_only=True):
    """`reply`: everything one engine has for one router after one iteration."""

    node: str
    incarnation: Incarnation
    t: UnixTime
    updates: list[LegUpdate]


class ResendRequest(Message, frozen=True, kw_only=True):
    """Ask for a request's tokens from index `seq` on; the engine keeps them until 30 s after the end.

    Answered by a `ReplyBatch` of one update: the leg's state, its tokens from `seq` on, and its end if it has ended. An
    empty batch: the engine does not know the leg (any more).
    """

    id: str
    attempt: Positive
    phase: Phase
    seq: Count


class CancelRequest(Message, frozen=True, kw_only=True):
    """`cancel`: end every leg of this attempt on the node; `phase` None means both."""

    id: str
    attempt: Positive
    phase: Phase | None = None


class CancelReply(Message, frozen=True, kw_only=True):
    """`known` False: no such leg here (any more); that is success too."""

    known: bool


class HandoffVerb(StrEnum):
    RESERVE = "reserve"
    DONE = "done"
    ABORT = "abort"


class Handoff(Message, frozen=True, kw_only=True):
    """`handoff`: the prefill engine to the decode engine, about one attempt.

    reserve: may this leg enter your engine now (room for its KV)? done: prefill ended, its first token is `token`.
    abort: prefill failed or was cancelled, release what is reserved.
    """

    verb: HandoffVerb
    id: str
    attempt: Positive
    node: str
    room: Room
    rendezvous: str = ""
    token: Token | None = None
    reason: str = ""


class HandoffReply(Message, frozen=True, kw_only=True):
    """`granted` False with a reason: full (ask again), unknown (the leg is not here), phase."""

    granted: bool
    reason: str = ""
    rendezvous: str = ""


class PromptRequest(Message, frozen=True, kw_only=True):
    """Read prompt tokens [first, first+count) of a request from its router, or bytes of its medium number `medium`."""

    id: str
    attempt: Positive
    first: Count
    count: Positive
    medium: Count | None = None


class PromptPart(Message, frozen=True, kw_only=True):
    """The asked tokens, or bytes of a medium; `known` False when the router has no such request or medium."""

    known: bool
    tokens: bytes = b""
    data: bytes = b""


SERVE_REQUEST = Decoder(ServeRequest)
SERVE_REPLY = Decoder(ServeReply)
REPLY_BATCH = Decoder(ReplyBatch)
RESEND_REQUEST = Decoder(ResendRequest)
CANCEL_REQUEST = Decoder(CancelRequest)
CANCEL_REPLY = Decoder(CancelReply)
HANDOFF = Decoder(Handoff)
HANDOFF_REPLY = Decoder(HandoffReply)
PROMPT_REQUEST = Decoder(PromptRequest)
PROMPT_PART = Decoder(PromptPart)
