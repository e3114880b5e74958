"""What the core asks its shell to do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from schemas.branch import BranchKind, Compaction
from schemas.media import Medium
from schemas.phase import Phase
from schemas.serve import FetchSource, Sampling
from services.router.core.context import Context
from services.router.core.failure import Failure
from services.router.core.misses import Cause
from services.router.core.placement import Candidate


class Outcome(StrEnum):
    """How a request ended: answered (stop or length), cancelled, refused before it began, or failed after."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    REJECTED = "rejected"
    FAILED = "failed"

    @property
    def answered(self) -> bool:
        return self in (Outcome.STOP, Outcome.LENGTH)


@dataclass(frozen=True, slots=True)
class AskDirectory:
    """Ask where the prefix of `context` lies; the answer, or None after the budget, goes to `on_match`."""

    request: str
    attempt: int
    context: Context


@dataclass(frozen=True, slots=True)
class ReleaseMatch:
    """Withdraw the pending prefix of a request that was cancelled or failed."""

    request: str


@dataclass(frozen=True, slots=True)
class Place:
    """Inside the core: choose nodes for a new attempt."""

    request: str


@dataclass(frozen=True, slots=True)
class PlaceDecode:
    """Inside the core: choose another decode node while the prefill leg still waits."""

    request: str


@dataclass(frozen=True, slots=True)
class SendLeg:
    """Send one leg to its node; its answer, or its silence, goes to `on_answer`."""

    request: str
    attempt: int
    phase: Phase
    node: str
    peer: str
    room: int
    prompt: bytes
    sampling: Sampling
    cached_tokens: int = 0
    fetch: tuple[FetchSource, ...] = ()
    resume: bool = False
    tenant: str = ""
    branch: str | None = None
    version: int | None = None
    traceparent: str | None = None
    media: tuple[Medium, ...] = ()


@dataclass(frozen=True, slots=True)
class CancelLeg:
    """End a leg at its node, whatever it is doing. `phase` None: both legs of the attempt."""

    request: str
    attempt: int
    node: str
    phase: Phase | None = None


@dataclass(frozen=True, slots=True)
class AskAgain:
    """Ask a node for the tokens of a leg from `seq` on, and whether it still has the leg."""

    request: str
    attempt: int
    phase: Phase
    node: str
    seq: int


@dataclass(frozen=True, slots=True)
class Placed:
    """The request has a place: what the response headers tell."""

    request: str
    prefill_node: str
    decode_node: str
    cached_tokens: int
    branch: str | None
    version: int | None
    candidates: Sequence[Candidate]


class EmitTokens(msgspec.Struct, frozen=True):
    """New tokens for the client. A struct, because there is one for each token of each stream."""

    request: str
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class StoreContext:
    """Publish the branch's new context: all tokens but the last generated one have KV.

    `keys` are those of blocks [base_blocks, blocks), `base` is the key of block base_blocks - 1.
    """

    request: str
    tenant: str
    branch: str
    version: int | None
    parent: str | None
    kind: BranchKind | None
    lineage: str
    life: int | None
    inferred: bool
    tip: int | None
    blocks: int
    base_blocks: int
    base: int | None
    keys: bytes
    prompt_blocks: int
    prefill_node: str
    decode_node: str
    family: str | None = None
    compaction: Compaction | None = None


@dataclass(frozen=True, slots=True)
class EndBranch:
    """Publish that a branch ended with its last answer."""

    request: str
    tenant: str
    branch: str


@dataclass(frozen=True, slots=True)
class Record:
    """Everything about a request that ended; times are monotonic seconds, None where that step was not reached."""

    request: str
    branch: str | None
    version: int | None
    outcome: Outcome
    arrived: float
    ended: float
    placed: float | None
    fetched: float | None
    prefill_started: float | None
    first_token: float | None
    prompt_tokens: int
    cached_tokens: int
    restored_tokens: int
    known_tokens: int
    output_tokens: int
    prefill_node: str | None
    decode_node: str | None
    attempts: int
    ttft_predicted_s: float | None
    blind: bool
    lineage: str
    candidates: Sequence[Candidate] = ()
    misses: Mapping[Cause, int] = field(default_factory=dict)
    differs_at: int | None = None
    tenant: str = ""
    media: int = 0

    @property
    def uncached_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    @property
    def lost_tokens(self) -> int:
        """Tokens whose KV had been produced before and that were computed again."""
        return max(0, self.known_tokens - self.cached_tokens)

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrived


@dataclass(frozen=True, slots=True)
class End:
    """The request is over, exactly once. `failure` is set unless it was answered; `trimmed`: the last token stopped
    the answer and is not part of its text. `tokens`: all of the answer."""

    record: Record
    failure: Failure | None = None
    trimmed: bool = False
    tokens: Sequence[int] = ()

    @property
    def request(self) -> str:
        return self.record.request


Effect = (
    AskDirectory
    | ReleaseMatch
    | Place
    | PlaceDecode
    | SendLeg
    | CancelLeg
    | AskAgain
    | Placed
    | EmitTokens
    | StoreContext
    | EndBranch
    | End
)
"""Effects are performed in the order given."""
