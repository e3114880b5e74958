"""The tokens of every answer, kept until some time after its end so that a lost message can be sent again."""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from schemas.serve import Finish, LegUpdate, RequestState
from schemas.telemetry import length_class
from services.engine.backend import LegKey


def by_length(given: Iterable[int]) -> list[int]:
    """How many of these answers are of each class of lengths, up to the last that has any."""
    counts = Counter(map(length_class, given))
    return [counts[k] for k in range(max(counts, default=-1) + 1)]


@dataclass(slots=True)
class Answer:
    """One leg's answer so far; `end` is its last update."""

    tokens: "array[int]" = field(default_factory=lambda: array("I"))
    state: RequestState | None = None
    end: LegUpdate | None = None


@dataclass(slots=True)
class Answers:
    """Answers by leg. Tokens are taken once and in order: whatever is said twice is cut off."""

    kept: dict[LegKey, Answer] = field(default_factory=dict)

    def state(self, key: LegKey, state: RequestState) -> LegUpdate:
        """A leg has come to a new state."""
        self.kept.setdefault(key, Answer()).state = state
        return LegUpdate(id=key.id, attempt=key.attempt, phase=key.phase, state=state)

    def tokens(self, key: LegKey, first: int, tokens: list[int]) -> LegUpdate | None:
        """Tokens [first, first + len) of an answer; None if all of them are here already. ValueError on a gap."""
        answer = self.kept.setdefault(key, Answer())
        have = len(answer.tokens)
        if first > have:
            raise ValueError(f"{key}: token {first} after {have} tokens: {first - have} are missing")
        fresh = tokens[have - first :]
        if not fresh:
            return None
        answer.tokens.extend(fresh)
        packed = array("I", fresh).tobytes()
        return LegUpdate(id=key.id, attempt=key.attempt, phase=key.phase, seq=have, tokens=packed)

    def end(
        self,
        key: LegKey,
        finish: Finish,
        reason: str,
        stop_token_ids: Sequence[int],
        cached_tokens: int | None,
        restored_tokens: int | None,
    ) -> LegUpdate:
        """The leg is over. The update says how many tokens the answer has."""
        answer = self.kept.setdefault(key, Answer())
        answer.state = RequestState.ENDED
        last = answer.tokens[-1] if answer.tokens else None
        stopped = finish is Finish.STOP and last in stop_token_ids
        answer.end = LegUpdate(
            id=key.id,
            attempt=key.attempt,
            phase=key.phase,
            seq=len(answer.tokens),
            finish=finish,
            reason=reason,
            cached_tokens=cached_tokens,
            restored_tokens=restored_tokens,
            stop_token=last if stopped else None,
        )
        return answer.end

    def since(self, key: LegKey, seq: int) -> LegUpdate | None:
        """Everything from token `seq` on, with state and end as far as known; None for an unknown leg."""
        answer = self.kept.get(key)
        if answer is None:
            return None
        first = min(seq, len(answer.tokens))
        end = answer.end
        return LegUpdate(
            id=key.id,
            attempt=key.attempt,
            phase=key.phase,
            state=answer.state,
            seq=first,
            tokens=answer.tokens[first:].tobytes(),
            finish=end.finish if end else None,
            reason=end.reason if end else "",
            cached_tokens=end.cached_tokens if end else None,
            restored_tokens=end.restored_tokens if end else None,
            stop_token=end.stop_token if end else None,
        )

    def given(self, key: LegKey) -> int:
        """Tokens of an answer so far."""
        answer = self.kept.get(key)
        return len(answer.tokens) if answer is not None else 0

    def forget(self, key: LegKey) -> None:
        """Nobody will ask for this answer any more."""
        self.kept.pop(key, None)
