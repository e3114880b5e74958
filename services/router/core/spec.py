"""What is asked of the router, where it was put, and when which step was reached."""

from collections.abc import Sequence
from dataclasses import dataclass

from schemas.serve import Sampling
from services.router.core.context import Context
from services.router.core.effects import Outcome
from services.router.core.identity import Identity
from services.router.core.placement import Candidate


@dataclass(frozen=True, slots=True)
class Spec:
    """What was asked: whose it is, its context, and how to choose tokens. `media_data`: the bytes of its media."""

    id: str
    identity: Identity
    context: Context
    sampling: Sampling
    timeout_s: float = 3600.0
    traceparent: str | None = None
    media_data: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Places:
    """The outcome of one placement: nodes, room, KV tokens the decode leg may need, and the predictions made."""

    prefill: Candidate
    decode_node: str
    room: int
    decode_tokens: int
    candidates: Sequence[Candidate] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """How the answer ended, as a leg told it. `trimmed`: its last token stopped it and is not text."""

    outcome: Outcome
    at: float
    trimmed: bool = False


@dataclass(slots=True)
class Times:
    """Monotonic seconds of the steps reached, as of the attempt that gave the first token, and the first prediction."""

    arrived: float
    placed: float | None = None
    fetched: float | None = None
    prefill_started: float | None = None
    first_token: float | None = None
    predicted_ttft_s: float | None = None
