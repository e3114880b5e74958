"""A switch from its order to the end of the last request of the old phase, and what was lost meanwhile."""

from dataclasses import dataclass, field

from schemas.phase import Phase, PhaseState, SwitchedNode, SwitchState
from schemas.telemetry import RequestTelemetry

ANSWERED = frozenset({"ok", "stop", "length"})
WITHDRAWN = frozenset({"cancelled", "rejected"})


@dataclass(slots=True)
class Part:
    """One node's part of a switch; `problem` says why it will not end."""

    node: str
    old: Phase
    new: Phase
    epoch: int
    incarnation: int
    took_s: float | None = None
    moved: int = 0
    longest_running_s: float | None = None
    problem: str = ""

    @property
    def open(self) -> bool:
        return self.took_s is None and not self.problem


@dataclass(slots=True)
class Switch:
    """One ordered change of the split. Times are monotonic seconds on the planner's clock.

    `lost_tokens`: prompt tokens that were known to the directory yet computed again by requests that ended between the
    order and the settle time after the last node; `failed`: requests that ended unanswered in that time.
    """

    decision_id: str
    ordered_at: float
    parts: dict[str, Part]
    ended_at: float | None = None
    lost_tokens: int = 0
    failed: int = 0

    @property
    def took_s(self) -> float | None:
        """From the command until the last request of the old phase has ended on the last node; None while open."""
        return None if self.ended_at is None else self.ended_at - self.ordered_at

    @property
    def problems(self) -> list[str]:
        return [f"{part.node}: {part.problem}" for part in self.parts.values() if part.problem]

    @property
    def moved(self) -> int:
        return sum(part.moved for part in self.parts.values())

    def nodes(self) -> list[SwitchedNode]:
        """The parts as the planner's reply carries them."""
        return [
            SwitchedNode(
                node=part.node,
                old=part.old,
                new=part.new,
                epoch=part.epoch,
                took_s=part.took_s,
                moved=part.moved,
                longest_running_s=part.longest_running_s,
            )
            for part in self.parts.values()
        ]


def lost_reuse(request: RequestTelemetry, block_size: int) -> int:
    """Tokens computed again although their keys were known: the last prompt token is always computed."""
    reusable = max(0, request.prompt_tokens - 1) // block_size * block_size
    return max(0, min(request.ideal_tokens, reusable) - request.cached_tokens)


@dataclass(slots=True)
class SwitchBook:
    """All switches that have not been reported yet."""

    settle_s: float
    timeout_s: float
    open: dict[str, Switch] = field(default_factory=dict)

    def begin(self, switch: Switch) -> None:
        """Take over its nodes: a node that is still in an older switch leaves that one."""
        for part in switch.parts.values():
            self.supersede(part.node, part.epoch, f"overtaken by decision {switch.decision_id}", switch.ordered_at)
        self.open[switch.decision_id] = switch

    def answered(self, state: PhaseState, now: float) -> None:
        """A node says that a phase command is carried out; states of other epochs say nothing about an open part."""
        if state.state is not SwitchState.SWITCHED:
            return
        for switch, part in self._parts(state.node):
            if part.epoch == state.epoch:
                part.took_s = now - switch.ordered_at if state.took_s is None else state.took_s
                part.moved = state.moved
                part.longest_running_s = state.longest_running_s
                self._close(switch, now)

    def supersede(self, node: str, epoch: int, problem: str, now: float) -> None:
        """A command of a higher epoch, ours or another planner's, ends the open part of this node."""
        for switch, part in self._parts(node):
            if part.epoch < epoch:
                part.problem = problem
                self._close(switch, now)

    def fail(self, node: str, problem: str, now: float) -> None:
        """The node is gone or its engine was started anew: nothing of the old phase runs there any more."""
        for switch, part in self._parts(node):
            part.problem = problem
            self._close(switch, now)

    def restarted(self, node: str, incarnation: int, now: float) -> None:
        """A heartbeat shows another engine process than the one that was told to switch."""
        for switch, part in self._parts(node):
            if part.incarnation != incarnation:
                part.problem = "its engine was started anew during the switch"
                self._close(switch, now)

    def request_ended(self, request: RequestTelemetry, block_size: int) -> None:
        """Charge a finished request to every switch under way."""
        for switch in self.open.values():
            if request.outcome in ANSWERED:
                switch.lost_tokens += lost_reuse(request, block_size)
            elif request.outcome not in WITHDRAWN:
                switch.failed += 1

    def due(self, now: float) -> list[Switch]:
        """Switches to report now: settled ones, and those past the timeout with the nodes still open named."""
        for switch in self.open.values():
            if switch.ended_at is None and now >= switch.ordered_at + self.timeout_s:
                for part in switch.parts.values():
                    if part.open:
                        part.problem = f"old phase still runs after {self.timeout_s:g} s"
                self._close(switch, now)
        ready = [s for s in self.open.values() if s.ended_at is not None and now >= s.ended_at + self.settle_s]
        for switch in ready:
            del self.open[switch.decision_id]
        return ready

    def next_deadline(self) -> float | None:
        """When `due` may have something next; None with nothing open."""
        return (
            min(
                (s.ordered_at + self.timeout_s if s.ended_at is None else s.ended_at + self.settle_s)
                for s in self.open.values()
            )
            if self.open
            else None
        )

    def _parts(self, node: str) -> list[tuple[Switch, Part]]:
        parts = ((switch, switch.parts.get(node)) for switch in self.open.values())
        return [(switch, part) for switch, part in parts if part is not None and part.open]

    def _close(self, switch: Switch, now: float) -> None:
        if switch.ended_at is None and not any(part.open for part in switch.parts.values()):
            switch.ended_at = now

    def check(self) -> None:
        """A node is in at most one open part; a switch has ended exactly when none of its parts is open."""
        seen: set[str] = set()
        for key, switch in self.open.items():
            assert key == switch.decision_id
            waiting = {part.node for part in switch.parts.values() if part.open}
            assert (switch.ended_at is None) == bool(waiting), f"{key}: ended {switch.ended_at}, open {waiting}"
            assert not waiting & seen, f"{waiting & seen} in two switches"
            seen |= waiting
            assert switch.lost_tokens >= 0 <= switch.failed
