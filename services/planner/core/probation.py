"""After a switch: does the work pile up more than it did before, and more than was expected? Then it is undone.

Two signals are looked at every few seconds: seconds of prefill work that waits, and requests in decode per node. A
signal is out of bounds when it is above what it was before the switch (scaled to the nodes there are now), or above
what was predicted, by more than a number of standard deviations; some such looks in a row end the trial.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev

from schemas.phase import Phase
from services.planner.core.fleet import Node
from services.planner.core.moves import Move
from services.planner.core.options import DecideSettings

_KEPT = 60
_LEAST_DEVIATION_S = 0.5
_LEAST_RUNNING = 1.0


@dataclass(frozen=True, slots=True)
class Expected:
    """What was predicted for the split on trial: requests per second its prefill nodes can do, before and now; mean
    TTFT in seconds; and requests in decode per node."""

    capacity_before_rps: float
    capacity_rps: float
    ttft_s: float
    running: float


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the queues: legs that wait on prefill nodes, requests in decode, and the nodes of each phase."""

    waiting: int
    decoding: int
    prefill_nodes: int
    decode_nodes: int

    @classmethod
    def at(cls, nodes: Sequence[Node]) -> "Look":
        serving = [node for node in nodes if node.phase.serves(Phase.PREFILL)]
        decode = [node for node in nodes if node.phase.serves(Phase.DECODE)]
        running = sum(node.running_decode for node in decode)
        return cls(sum(node.waiting for node in serving), running, len(serving), len(decode))


@dataclass(slots=True)
class Trial:
    """A switch on probation. `limit_s` bounds waiting prefill work, `limit_running` requests in decode per node."""

    decision_id: str
    split_before: str
    split_now: str
    moves: tuple[Move, ...]
    until: float
    expected: Expected
    limit_s: float
    limit_running: float
    strikes: int = 0
    seen: str = ""


@dataclass(slots=True)
class Probation:
    """Looks every `probation_tick_s`, and the switch on trial if there is one."""

    settings: DecideSettings
    looks: deque[Look] = field(default_factory=lambda: deque(maxlen=_KEPT))
    trial: Trial | None = None
    next_look: float = float("-inf")

    def begin(self, trial_of: tuple[str, str, str], moves: Sequence[Move], expected: Expected, now: float) -> None:
        """Put a switch on trial: (decision id, split before, split now). Without looks before it there is none."""
        decision_id, before, after = trial_of
        if not self.looks:
            return
        waits = [look.waiting / expected.capacity_before_rps for look in self.looks]
        loads = [look.decoding / max(1, look.decode_nodes) for look in self.looks]
        last = self.looks[-1]
        gone = sum(1 if move.old is Phase.DECODE else -1 for move in moves)
        scale_p = expected.capacity_before_rps / expected.capacity_rps
        scale_d = max(1, last.decode_nodes) / max(1, last.decode_nodes - gone)
        sigmas = self.settings.probation_sigmas
        limit_s = max(fmean(waits) * scale_p, expected.ttft_s)
        limit_s += sigmas * max(pstdev(waits) * scale_p, _LEAST_DEVIATION_S, last.prefill_nodes / expected.capacity_rps)
        limit_running = max(fmean(loads) * scale_d, expected.running)
        limit_running += sigmas * max(pstdev(loads) * scale_d, _LEAST_RUNNING)
        until = now + self.settings.probation_s
        self.trial = Trial(decision_id, before, after, tuple(moves), until, expected, limit_s, limit_running)

    def end(self) -> None:
        """Nothing is on trial any more: the switch was overtaken."""
        self.trial = None

    def look(self, nodes: Sequence[Node], now: float) -> Trial | None:
        """Take a look if it is time; the trial that has failed by it, if so."""
        if now < self.next_look:
            return None
        self.next_look = now + self.settings.probation_tick_s
        look = Look.at(nodes)
        self.looks.append(look)
        trial = self.trial
        if trial is None:
            return None
        if now >= trial.until:
            self.trial = None
            return None
        wait_s = look.waiting / trial.expected.capacity_rps
        running = look.decoding / max(1, look.decode_nodes)
        out = wait_s > trial.limit_s or running > trial.limit_running
        trial.strikes = trial.strikes + 1 if out else 0
        trial.seen = (
            f"{wait_s:.1f} s of prefill wait (limit {trial.limit_s:.1f} s), "
            f"{running:.1f} requests decode per node (limit {trial.limit_running:.1f})"
        )
        if trial.strikes < self.settings.probation_ticks:
            return None
        self.trial = None
        return trial

    def check(self) -> None:
        assert self.trial is None or 0 <= self.trial.strikes < self.settings.probation_ticks
