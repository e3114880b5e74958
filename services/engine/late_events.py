"""Events of an engine that starts before its service knows what it is."""

from schemas.kv import LocationChange
from schemas.serve import Finish, RequestState
from schemas.telemetry import Iteration
from services.engine.backend import BackendEvents, LegKey


class LateEvents:
    """Passes every event on to `target`. Before there is one no leg is inside: only iterations and changes of device
    memory can come, from an engine that warms up; changes are kept for `target`."""

    def __init__(self) -> None:
        self._target: BackendEvents | None = None
        self._kept: list[LocationChange] = []

    @property
    def target(self) -> BackendEvents:
        assert self._target is not None, "an event of a leg before any leg was submitted"
        return self._target

    @target.setter
    def target(self, target: BackendEvents) -> None:
        self._target = target
        if self._kept:
            target.device_changes(self._kept)

    def state(self, key: LegKey, state: RequestState) -> None:
        self.target.state(key, state)

    def tokens(self, key: LegKey, first_index: int, tokens: list[int]) -> None:
        self.target.tokens(key, first_index, tokens)

    def ended(self, key: LegKey, finish: Finish, reason: str, cached_tokens: int, restored_tokens: int) -> None:
        self.target.ended(key, finish, reason, cached_tokens, restored_tokens)

    def iteration(self, iteration: Iteration) -> None:
        if self._target is not None:
            self._target.iteration(iteration)

    def device_changes(self, changes: list[LocationChange]) -> None:
        if self._target is None:
            self._kept += changes
        else:
            self._target.device_changes(changes)

    def failed(self, reason: str) -> None:
        self.target.failed(reason)
