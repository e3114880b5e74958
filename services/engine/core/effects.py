"""What the queue core asks its shell to do, in the order given."""

import msgspec

from schemas.phase import Phase, SwitchState
from schemas.serve import FetchSource, Finish, HandoffVerb, RequestState
from services.engine.backend import LegKey


class ReadPrompt(msgspec.Struct, frozen=True):
    """Read a prompt too large for one message from its router; answer with `prompt_read` or `prompt_lost`."""

    key: LegKey


class Fetch(msgspec.Struct, frozen=True):
    """Bring the prefix into the own pool and pin it under `fetch_id`; answer with `fetched`. No sources: pin only."""

    key: LegKey
    fetch_id: str
    sources: tuple[FetchSource, ...]


class Release(msgspec.Struct, frozen=True):
    """End a fetch or the pin it left; what arrives for it later is discarded."""

    fetch_id: str


class FetchGivenUp(msgspec.Struct, frozen=True):
    """A fetch took longer than computing its tokens again would: `waited_s` at the head of the queue."""

    key: LegKey
    waited_s: float


class Ask(msgspec.Struct, frozen=True):
    """Ask `peer` to reserve room for the decode leg; answer with `answered(number, ...)`, whatever happens."""

    number: int
    key: LegKey
    peer: str
    room: int


class Tell(msgspec.Struct, frozen=True):
    """Tell `peer` that the prefill is done (answer with `told`) or that it will not come (no answer wanted)."""

    verb: HandoffVerb
    key: LegKey
    peer: str
    room: int
    token: int | None = None
    reason: str = ""


class Submit(msgspec.Struct, frozen=True):
    """Put a leg into the engine."""

    key: LegKey
    rendezvous: str
    restorable_blocks: int


class CancelInside(msgspec.Struct, frozen=True):
    """Cancel a leg in the engine; its end follows as an event of the engine."""

    key: LegKey


class Prefilled(msgspec.Struct, frozen=True):
    """Hand the first token to the decode leg in the engine."""

    key: LegKey
    token: int


class Report(msgspec.Struct, frozen=True):
    """News of a leg for its router. With `finish` the leg is over and its prompt may go."""

    key: LegKey
    router: str
    state: RequestState | None = None
    finish: Finish | None = None
    reason: str = ""
    cached_tokens: int | None = None
    restored_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()


class Forget(msgspec.Struct, frozen=True):
    """The answer of a leg that ended long ago need not be kept any more."""

    key: LegKey


class PhaseReport(msgspec.Struct, frozen=True):
    """The node's answer to a phase command."""

    phase: Phase
    epoch: int
    state: SwitchState
    decision_id: str
    took_s: float | None = None
    moved: int = 0
    longest_running_s: float | None = None


class DropDecodeCache(msgspec.Struct, frozen=True):
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
