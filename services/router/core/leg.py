"""One leg of an attempt, as its router follows it."""

from dataclasses import dataclass

from schemas.phase import Phase
from schemas.serve import Finish, RequestState

_WAITING = (None, RequestState.QUEUED, RequestState.FETCHING, RequestState.READY)
PREFILL_SILENCE_S = 5.0
DECODE_SILENCE_S = 2.0
"""A leg without news for this long is asked for: its last message may be lost. Liveness is the heartbeat's business."""
MISSED_S = PREFILL_SILENCE_S + 1.0
"""A decode leg that still waits so long after the hand-off, asked for meanwhile, is not the one that was handed to."""


@dataclass(slots=True)
class Leg:
    """Where one leg stands. `finish` None: it may still hold something at its node."""

    phase: Phase
    node: str
    peer: str
    room: int
    heard: float
    state: RequestState | None = None
    finish: Finish | None = None
    ended_at: float = 0.0
    accepted: bool = False
    started: float | None = None

    @property
    def open(self) -> bool:
        return self.finish is None

    @property
    def waiting(self) -> bool:
        """Still in its node's own queue: the decode node may be changed."""
        return self.open and self.state in _WAITING

    def missed(self, prefill: "Leg", now: float) -> bool:
        """Whether the prefill leg has handed off to another decode leg than this: word of the move came too late."""
        return self.waiting and prefill.finish is Finish.HANDED_OFF and now - prefill.ended_at > MISSED_S

    def silent(self, now: float) -> bool:
        limit = DECODE_SILENCE_S if self.state is RequestState.DECODING else PREFILL_SILENCE_S
        return self.open and now - self.heard > limit
