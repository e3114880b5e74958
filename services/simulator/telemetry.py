"""What a simulated node says of itself: its hello and its heartbeat, as the services' messages."""

from schemas.kv import Capacities, NodeHello
from schemas.phase import Phase, PhaseCommand
from schemas.telemetry import KvUse, NodeTelemetry, TierUse
from services.simulator.system import Cluster, NodeView


def hello_of(name: str, node: NodeView, cluster: Cluster) -> NodeHello:
    """k and E come from the coefficients' expert share (as k of 1/share experts)."""
    share = cluster.times.active_share
    return NodeHello(
        node=name,
        incarnation=1,
        engine_incarnation=1,
        model=cluster.hardware.name,
        block_size=cluster.block_tokens,
        key_version="simulated",
        ranks=1,
        engine="simulated",
        dtype="",
        capacities=Capacities(l1_tokens=node.l1_tokens, l2_tokens=node.l2_tokens, running=cluster.hardware.max_running),
        transfer="",
        experts_per_token=1000 if share < 1 else 0,
        experts=round(1000 / share) if share < 1 else 0,
        batch_tokens=cluster.batch_tokens,
    )


def beat_of(name: str, node: NodeView, phase: Phase, epoch: int, now: float) -> NodeTelemetry:
    """`phase` and `epoch` are those of the last command it obeyed."""
    waiting = sum(call.prefill_started_at is None for call in node.prefill_calls.values())
    running = len(node.prefill_calls) - waiting
    return NodeTelemetry(
        node=name,
        t=now,
        incarnation=1,
        phase=phase,
        epoch=epoch,
        waiting=waiting,
        running=running + node.decoding,
        running_prefill=running,
        running_decode=node.decoding,
        decoding_by_length=node.decoding_by_length(now),
        kv=KvUse(
            l1=TierUse(used=0, total=node.l1_tokens),
            l2=TierUse(used=node.l2_used_tokens, total=node.l2_tokens, referenced=node.l2_referenced_tokens),
        ),
        last_kv_seq=0,
        engine_incarnation=1,
    )


def command_of(node: str, phase: Phase, epoch: int, now: float) -> PhaseCommand:
    """A phase command as the planner publishes it."""
    return PhaseCommand(id=f"{node}/{epoch}", t=now, node=node, phase=phase, epoch=epoch, reason="", decision_id="")
