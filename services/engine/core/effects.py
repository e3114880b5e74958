"""What the queue core asks its shell to do, in the order given."""

from dataclasses import dataclass

from schemas.phase import Phase, SwitchState
from schemas.serve import FetchSource, Finish, HandoffVerb, RequestState
from services.engine.backend import LegKey


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """Read a prompt too large for one message from its router; answer with `prompt_read` or `prompt_lost`."""

    key: LegKey


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring the prefix into the own pool and pin it under `fetch_id`; answer with `fetched`. No sources: pin only."""

    key: LegKey
    fetch_id: str
    sources: tuple[FetchSource, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """End a fetch or the pin it left; what arrives for it later is discarded."""

    fetch_id: str


@dataclass(frozen=True, slots=True)
class FetchGivenUp:
    """A fetch took longer than computing its tokens again would: `waited_s` at the head of the queue."""

    key: LegKey
    waited_s: float


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask `peer` to reserve room for the decode leg; answer with `answered(number, ...)`, whatever happens."""

    number: int
    key: LegKey
    peer: str
    room: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell `peer` that the prefill is done (answer with `told`) or that it will not come (no answer wanted)."""

    verb: HandoffVerb
    key: LegKey
    peer: str
    room: int
    token: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Submit:
    """Put a leg into the engine."""

    key: LegKey
    rendezvous: str
    restorable_blocks: int


@dataclass(frozen=True, slots=True)
class CancelInside:
    """Cancel a leg in the engine; its end follows as an event of the engine."""

    key: LegKey


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Hand the first token to the decode leg in the engine."""

    key: LegKey
    token: int


@dataclass(frozen=True, slots=True)
class Report:
    """News of a leg for its router. With `finish` the leg is over and its prompt may go."""

    key: LegKey
    router: str
    state: RequestState | None = None
    finish: Finish | None = None
    reason: str = ""
    cached_tokens: int | None = None
    restored_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Forget:
    """The answer of a leg that ended long ago need not be kept any more."""

    key: LegKey


@dataclass(frozen=True, slots=True)
class PhaseReport:
    """The node's answer to a phase command."""

    phase: Phase
    epoch: int
    state: SwitchState
    decision_id: str
    took_s: float | None = None
    moved: int = 0
    longest_running_s: float | None = None


@dataclass(frozen=True, slots=True)
class DropDecodeCache:
    """The last decode of a node that no longer decodes has ended: device blocks that only decode used may go."""


Effect = (
    ReadPrompt
    | Fetch
    | Release
    | FetchGivenUp
    | Ask
    | Tell
    | Submit
    | CancelInside
    | Prefilled
    | Report
    | Forget
    | PhaseReport
    | DropDecodeCache
)
