"""Which phase the node runs, by whose order, and when the last request of the old phase has ended."""

from dataclasses import dataclass, field

from schemas.phase import Phase, PhaseCommand, SwitchState
from services.engine.backend import LegKey
from services.engine.core.effects import DropDecodeCache, Effect, PhaseReport


@dataclass(slots=True)
class PhaseSwitch:
    """The node's phase and epoch, and the switch under way.

    `draining`: legs of the old phase that still run; the switch ends with the last of them. `started_at` is the
    receipt of the newest command, None when no switch is under way.
    """

    phase: Phase
    epoch: int = 0
    draining: set[LegKey] = field(default_factory=set)
    started_at: float | None = None
    decision_id: str = ""
    moved: int = 0
    longest_s: float | None = None
    drops_decode: bool = False

    def obey(self, command: PhaseCommand, now: float) -> bool:
        """Take a command; False if its epoch is not above the node's own."""
        if command.epoch <= self.epoch:
            return False
        left_decode = self.phase.serves(Phase.DECODE) and not command.phase.serves(Phase.DECODE)
        self.drops_decode = left_decode or (self.drops_decode and not command.phase.serves(Phase.DECODE))
        self.phase, self.epoch, self.decision_id = command.phase, command.epoch, command.decision_id
        self.started_at, self.moved, self.longest_s = now, 0, None
        self.draining.clear()
        return True

    def begin(self, moved: int, running: set[LegKey], now: float) -> list[Effect]:
        """After `obey`: `moved` waiting legs were given back, `running` ones of the old phase end in place."""
        self.moved = moved
        self.draining = running
        self.longest_s = 0.0 if running else None
        if running:
            return [PhaseReport(self.phase, self.epoch, SwitchState.DRAINING, self.decision_id, moved=moved)]
        return self._switched(now)

    def ran(self, key: LegKey, now: float) -> None:
        """A leg has left the engine."""
        if key in self.draining and self.started_at is not None:
            self.longest_s = max(self.longest_s or 0.0, now - self.started_at)

    def ended(self, key: LegKey, now: float) -> list[Effect]:
        """A leg is over; the switch is too if it was the last of the old phase."""
        if key not in self.draining:
            return []
        self.draining.remove(key)
        return [] if self.draining else self._switched(now)

    def check(self) -> None:
        assert self.started_at is not None or not self.draining, self.draining
        assert not any(self.phase.serves(key.phase) for key in self.draining), (self.phase, self.draining)

    def _switched(self, now: float) -> list[Effect]:
        assert self.started_at is not None
        report = PhaseReport(
            self.phase,
            self.epoch,
            SwitchState.SWITCHED,
            self.decision_id,
            took_s=now - self.started_at,
            moved=self.moved,
            longest_running_s=self.longest_s,
        )
        self.started_at = None
        drops, self.drops_decode = self.drops_decode, False
        return [DropDecodeCache(), report] if drops else [report]
