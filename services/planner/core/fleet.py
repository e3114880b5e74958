"""What the planner knows of its nodes: their heartbeats, and the commands that are still on their way to them."""

from collections.abc import Iterable
from dataclasses import dataclass

from schemas.phase import Phase
from schemas.telemetry import NodeTelemetry


@dataclass(frozen=True, slots=True)
class Pending:
    """A command in the phase stream; it stands for the node's phase until a heartbeat carries its epoch."""

    phase: Phase
    epoch: int
    decision_id: str


@dataclass(slots=True)
class Node:
    """One node as of its last heartbeat. `heard_at` is monotonic seconds; `referenced_tokens` lie in its host pool."""

    name: str
    reported: Phase
    epoch: int
    incarnation: int
    running_prefill: int
    running_decode: int
    waiting: int
    referenced_tokens: int
    heard_at: float
    pending: Pending | None = None

    @property
    def phase(self) -> Phase:
        """The phase it serves, or will serve once it reads the command that is on its way."""
        return self.pending.phase if self.pending is not None else self.reported

    def running_of(self, phase: Phase) -> int:
        """Running requests of `phase` (prefill or decode)."""
        return self.running_prefill if phase is Phase.PREFILL else self.running_decode


@dataclass(frozen=True, slots=True)
class SplitView:
    """How many live nodes serve each phase; `both` nodes serve both and are counted apart."""

    prefill: int
    decode: int
    both: int

    def serving(self, phase: Phase) -> int:
        """Nodes that take requests of `phase` (prefill or decode)."""
        return self.both + (self.prefill if phase is Phase.PREFILL else self.decode)

    def __str__(self) -> str:
        return f"{self.prefill}P{self.decode}D" + (f"+{self.both}both" if self.both else "")


def view_of(phases: Iterable[Phase]) -> SplitView:
    """Count phases."""
    listed = list(phases)
    return SplitView(listed.count(Phase.PREFILL), listed.count(Phase.DECODE), listed.count(Phase.BOTH))


class Fleet:
    """Live nodes by name. The split is what heartbeats say, never what was ordered before."""

    def __init__(self, node_timeout_s: float) -> None:
        self._timeout_s = node_timeout_s
        self._nodes: dict[str, Node] = {}
        self._pending: dict[str, Pending] = {}
        self._last: dict[str, Pending] = {}
        self._epochs: dict[str, int] = {}

    def heard(self, beat: NodeTelemetry, now: float) -> None:
        """Take a heartbeat; a pending command that it confirms or overtakes is forgotten."""
        pending = self._pending.get(beat.node)
        if pending is not None and beat.epoch >= pending.epoch:
            pending = None
            del self._pending[beat.node]
        self._epochs[beat.node] = max(self._epochs.get(beat.node, 0), beat.epoch)
        self._nodes[beat.node] = Node(
            name=beat.node,
            reported=beat.phase,
            epoch=beat.epoch,
            incarnation=beat.engine_incarnation,
            running_prefill=beat.running_prefill,
            running_decode=beat.running_decode,
            waiting=beat.waiting,
            referenced_tokens=beat.kv.l2.referenced,
            heard_at=now,
            pending=pending,
        )

    def commanded(self, name: str, pending: Pending) -> bool:
        """A command for `name`; False when it is known already or older than the last one.

        The stream holds one command per node and epoch: of two planners that chose the same epoch, the one whose
        command was not stored sees the other's here, and it counts.
        """
        if pending.epoch < self._epochs.get(name, 0) or pending == self._last.get(name):
            return False
        if pending.epoch == self._epochs.get(name, 0) and name not in self._last:
            return False
        self._epochs[name] = pending.epoch
        self._last[name] = pending
        self._pending[name] = pending
        if name in self._nodes:
            self._nodes[name].pending = pending
        return True

    def forget_command(self, name: str, decision_id: str) -> None:
        """The command did not reach the stream or was not obeyed in time: the heartbeat alone counts again."""
        pending = self._pending.get(name)
        if pending is not None and pending.decision_id == decision_id:
            del self._pending[name]
            if name in self._nodes:
                self._nodes[name].pending = None

    def next_epoch(self, name: str) -> int:
        """The epoch of the next command to `name`: above every one seen in heartbeats and in the stream."""
        return self._epochs.get(name, 0) + 1

    def get(self, name: str) -> Node | None:
        return self._nodes.get(name)

    def live(self) -> list[Node]:
        """All nodes not yet removed by `expire`, by name."""
        return [self._nodes[name] for name in sorted(self._nodes)]

    def expire(self, now: float) -> list[str]:
        """Remove nodes silent for longer than the timeout and return their names."""
        silent = [name for name, node in self._nodes.items() if now - node.heard_at > self._timeout_s]
        for name in silent:
            del self._nodes[name]
        return sorted(silent)

    def split(self) -> SplitView:
        """The split now."""
        return view_of(node.phase for node in self._nodes.values())

    def check(self) -> None:
        """Every pending command is above its node's epoch and known to the node; epochs never fall."""
        for name, node in self._nodes.items():
            assert node.pending == self._pending.get(name), f"{name}: pending {node.pending}"
            assert node.epoch <= self._epochs[name], f"{name}: epoch {node.epoch} above {self._epochs[name]}"
        for name, pending in self._pending.items():
            assert pending.epoch <= self._epochs[name], f"{name}: pending epoch {pending.epoch}"
