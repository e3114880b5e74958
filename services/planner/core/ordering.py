"""What an order becomes: commands to nodes, each under a new epoch, and a switch that is followed to its end."""

from collections.abc import Sequence
from dataclasses import dataclass

from schemas.phase import Phase, Workload
from services.planner.core.fleet import Fleet, Pending
from services.planner.core.moves import Move
from services.planner.core.switches import Part, Switch, SwitchBook
from services.planner.core.windows import Windows


@dataclass(frozen=True, slots=True)
class Command:
    """Tell `node` to serve `phase`, as `epoch`."""

    node: str
    phase: Phase
    epoch: int


@dataclass(frozen=True, slots=True)
class Order:
    """What an accepted order becomes; without commands the split is the wanted one already."""

    decision_id: str
    split_now: str
    split_new: str
    commands: list[Command]
    workload: Workload | None
    q: float | None


@dataclass(slots=True)
class Ordering:
    """Nodes, switches under way and windows, which an order changes together."""

    fleet: Fleet
    switches: SwitchBook
    windows: Windows
    drain_wait_s: float

    def order(self, moves: Sequence[Move], decision_id: str, now: float) -> Order:
        """Carry out `moves` of live nodes."""
        split_now = str(self.fleet.split())
        commands = [Command(move.node, move.new, self.fleet.next_epoch(move.node)) for move in moves]
        parts = {
            move.node: Part(move.node, move.old, move.new, command.epoch, self._incarnation(move.node))
            for move, command in zip(moves, commands, strict=True)
        }
        if parts:
            self.switches.begin(Switch(decision_id, now, parts))
        for command in commands:
            self.fleet.commanded(command.node, Pending(command.phase, command.epoch, decision_id))
        self.mark_windows(now)
        workload, q = self.windows.recent(now)
        return Order(decision_id, split_now, str(self.fleet.split()), commands, workload, q)

    def withdraw(self, order: Order, problem: str, now: float) -> None:
        """The commands did not reach the stream: the order's open parts end with `problem`."""
        for command in order.commands:
            self.fleet.forget_command(command.node, order.decision_id)
            self.switches.fail(command.node, problem, now)
        self.mark_windows(now)

    def under_way(self, now: float) -> bool:
        """Whether a switch has not ended and is not older than `drain_wait_s`."""
        return any(
            switch.ended_at is None and now < switch.ordered_at + self.drain_wait_s
            for switch in self.switches.open.values()
        )

    def mark_windows(self, now: float) -> None:
        """Tell the windows whether a switch is under way."""
        self.windows.switching(active=self.under_way(now))

    def _incarnation(self, name: str) -> int:
        node = self.fleet.get(name)
        assert node is not None, f"a move of {name!r}, which is not live"
        return node.incarnation
