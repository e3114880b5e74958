"""The nodes as the router knows them: what they are, which phase they serve, whether they live."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from schemas.kv import NodeHello
from schemas.phase import Phase, PhaseCommand
from schemas.telemetry import NodeTelemetry

_SAME = ("model", "dtype", "block_size", "key_version")
"""Fields of a hello in which all nodes of a cluster agree: a block means the same everywhere."""


@dataclass(slots=True)
class Node:
    """One node. `phase` and `epoch` are the newest of command and heartbeat; `refusal` says why it is not used.

    `closed`: phases it refused at an epoch whose command has not reached us yet.
    """

    name: str
    hello: NodeHello | None = None
    telemetry: NodeTelemetry | None = None
    heard: float = float("-inf")
    phase: Phase | None = None
    epoch: int = 0
    engine_incarnation: int | None = None
    refusal: str = ""
    lost: bool = False
    closed: dict[Phase, int] = field(default_factory=dict)

    def serves(self, phase: Phase) -> bool:
        """Whether legs of `phase` may be sent to it, liveness left aside."""
        known = self.hello is not None and self.telemetry is not None and self.telemetry.ready
        return known and not self.refusal and phase not in self.closed and (self.phase or Phase.BOTH).serves(phase)

    def order(self, phase: Phase, epoch: int) -> None:
        """Phase as of `epoch`; older news changes nothing."""
        if self.phase is None or epoch >= self.epoch:
            self.phase, self.epoch = phase, epoch
            self.closed = {closed: at for closed, at in self.closed.items() if at > epoch}


class Nodes:
    """Follows hello, heartbeat and phase command; says who may get a leg and who was lost.

    The first accepted hello fixes model, dtype, block size and key version; a node that differs is refused by name.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.reference: NodeHello | None = None
        self._nodes: dict[str, Node] = {}
        self._grace_from = float("-inf")
        self._suspended = False

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def get(self, name: str) -> Node | None:
        return self._nodes.get(name)

    def on_hello(self, hello: NodeHello, now: float) -> bool:
        """Learn what a node is. True when its engine was started anew, so that its requests are gone."""
        node = self._node(hello.node)
        restarted = self._incarnation(node, hello.engine_incarnation)
        node.hello, node.refusal = hello, ""
        others = any(
            other is not node and other.hello and not other.refusal and self.alive(other.name, now) for other in self
        )
        if self.reference is None or not others:
            self.reference = hello
        node.refusal = "; ".join(
            f"{name} {getattr(hello, name)!r}, the cluster has {getattr(self.reference, name)!r}"
            for name in _SAME
            if getattr(hello, name) != getattr(self.reference, name)
        )
        return restarted

    def on_telemetry(self, telemetry: NodeTelemetry, now: float) -> bool:
        """A heartbeat. True when the engine was started anew, so that its requests are gone."""
        node = self._node(telemetry.node)
        restarted = self._incarnation(node, telemetry.engine_incarnation)
        if restarted:
            node.phase, node.closed = None, {}
        node.telemetry, node.heard, node.lost = telemetry, now, False
        node.order(telemetry.phase, telemetry.epoch)
        return restarted

    def on_command(self, command: PhaseCommand) -> None:
        """From here on nothing of the old phase is sent, whatever the node has understood yet."""
        self._node(command.node).order(command.phase, command.epoch)

    def on_refusal(self, name: str, phase: Phase, epoch: int) -> None:
        """A node refused a leg for its phase: if it knows a newer epoch than we do, stop until we hear of it."""
        node = self._node(name)
        if epoch > node.epoch:
            node.closed[phase] = epoch

    def suspend(self) -> None:
        """The bus is gone: silence says nothing about nodes."""
        self._suspended = True

    def resume(self, now: float) -> None:
        """The bus is back: every node has its timeout again to be heard."""
        self._suspended, self._grace_from = False, now

    def alive(self, name: str, now: float) -> bool:
        """Whether the node was heard within the timeout (always, once heard, while the bus is gone)."""
        node = self._nodes.get(name)
        if node is None or node.telemetry is None:
            return False
        return self._suspended or now - max(node.heard, self._grace_from) <= self.timeout_s

    @property
    def grace_from(self) -> float:
        """Since when silence counts again."""
        return self._grace_from

    @property
    def suspended(self) -> bool:
        """Whether the bus is gone, so that silence says nothing."""
        return self._suspended

    def serving(self, phase: Phase, now: float) -> list[Node]:
        """Live nodes that take legs of `phase`, in order of name."""
        found = [node for node in self if node.serves(phase) and self.alive(node.name, now)]
        return sorted(found, key=lambda node: node.name)

    def newly_lost(self, now: float) -> list[str]:
        """Nodes that fell silent since the last call; each is named once until it is heard again."""
        gone = [node for node in self if node.telemetry and not node.lost and not self.alive(node.name, now)]
        for node in gone:
            node.lost = True
        return [node.name for node in gone]

    def check(self) -> None:
        """Accepted nodes agree with the reference; closed phases are ahead of the known epoch."""
        for node in self:
            assert all(epoch > node.epoch for epoch in node.closed.values())
            if node.hello and not node.refusal and self.reference:
                assert all(getattr(node.hello, name) == getattr(self.reference, name) for name in _SAME)

    def _node(self, name: str) -> Node:
        return self._nodes.setdefault(name, Node(name))

    @staticmethod
    def _incarnation(node: Node, incarnation: int) -> bool:
        changed = node.engine_incarnation is not None and incarnation != node.engine_incarnation
        node.engine_incarnation = incarnation
        return changed
