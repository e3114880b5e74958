"""What the router knows of nodes: phase, life, and who may belong to the cluster."""

from schemas.kv import Capacities, NodeHello
from schemas.phase import Phase, PhaseCommand
from schemas.telemetry import KvUse, NodeTelemetry, TierUse
from services.router.core.nodes import Nodes


def hello(node: str = "n", incarnation: int = 1, **more: object) -> NodeHello:
    fields: dict[str, object] = {
        "node": node,
        "incarnation": 1,
        "engine_incarnation": incarnation,
        "model": "m",
        "block_size": 16,
        "key_version": "k",
        "ranks": 1,
        "engine": "timed",
        "dtype": "fp32",
        "capacities": Capacities(l1_tokens=1, l2_tokens=1),
        "transfer": "",
    }
    return NodeHello(**(fields | more))  # type: ignore[arg-type]


def beat(node: str = "n", phase: Phase = Phase.PREFILL, epoch: int = 0, incarnation: int = 1) -> NodeTelemetry:
    use = TierUse(used=0, total=1)
    return NodeTelemetry(
        node=node,
        t=0,
        incarnation=1,
        phase=phase,
        epoch=epoch,
        waiting=0,
        running=0,
        kv=KvUse(l1=use, l2=use),
        last_kv_seq=0,
        engine_incarnation=incarnation,
    )


def command(phase: Phase, epoch: int, node: str = "n") -> PhaseCommand:
    return PhaseCommand(id="c", t=0, node=node, phase=phase, epoch=epoch, reason="", decision_id="")


def known(*names: str) -> Nodes:
    nodes = Nodes(timeout_s=3)
    for name in names or ("n",):
        nodes.on_hello(hello(name), 0)
        nodes.on_telemetry(beat(name), 0)
    return nodes


def serving(nodes: Nodes, phase: Phase, now: float = 0) -> list[str]:
    return [node.name for node in nodes.serving(phase, now)]


def test_command_counts_before_the_node_has_obeyed() -> None:
    nodes = known()
    nodes.on_command(command(Phase.DECODE, 1))
    assert (serving(nodes, Phase.PREFILL), serving(nodes, Phase.DECODE)) == ([], ["n"])
    nodes.on_telemetry(beat(phase=Phase.PREFILL, epoch=0), 1)
    assert serving(nodes, Phase.PREFILL, 1) == []
    nodes.on_telemetry(beat(phase=Phase.DECODE, epoch=1), 1)
    assert serving(nodes, Phase.DECODE, 1) == ["n"]
    nodes.check()


def test_older_command_changes_nothing() -> None:
    nodes = known()
    nodes.on_telemetry(beat(phase=Phase.DECODE, epoch=5), 0)
    nodes.on_command(command(Phase.PREFILL, 4))
    assert serving(nodes, Phase.DECODE) == ["n"]


def test_refusal_of_a_newer_epoch_closes_the_phase_until_it_is_known() -> None:
    nodes = known()
    nodes.on_refusal("n", Phase.PREFILL, 2)
    assert serving(nodes, Phase.PREFILL) == []
    nodes.check()
    nodes.on_command(command(Phase.BOTH, 3))
    assert serving(nodes, Phase.PREFILL) == ["n"]


def test_refusal_of_an_older_epoch_changes_nothing() -> None:
    nodes = known()
    nodes.on_telemetry(beat(epoch=3), 0)
    nodes.on_refusal("n", Phase.PREFILL, 2)
    assert serving(nodes, Phase.PREFILL) == ["n"]


def test_silent_node_is_lost_once_and_comes_back() -> None:
    nodes = known("a", "b")
    nodes.on_telemetry(beat("b"), 2)
    assert nodes.newly_lost(3.1) == ["a"]
    assert nodes.newly_lost(3.2) == []
    assert serving(nodes, Phase.PREFILL, 3.2) == ["b"]
    nodes.on_telemetry(beat("a"), 4)
    assert serving(nodes, Phase.PREFILL, 4) == ["a", "b"]
    assert nodes.newly_lost(7.1) == ["a", "b"]


def test_restarted_engine_has_lost_its_requests() -> None:
    nodes = known()
    assert not nodes.on_telemetry(beat(), 1)
    assert nodes.on_telemetry(beat(incarnation=2), 2)
    assert not nodes.on_hello(hello(incarnation=2), 2)


def test_silence_says_nothing_while_the_bus_is_gone() -> None:
    nodes = known()
    nodes.suspend()
    assert nodes.newly_lost(100) == []
    nodes.resume(100)
    assert nodes.newly_lost(102.9) == []
    assert nodes.newly_lost(103.1) == ["n"]


def test_case_63_node_of_another_block_size_is_refused_with_both_values() -> None:
    nodes = known("a")
    nodes.on_hello(hello("b", block_size=32), 0)
    nodes.on_telemetry(beat("b"), 0)
    refused = nodes.get("b")
    assert refused is not None
    assert refused.refusal == "block_size 32, the cluster has 16"
    assert serving(nodes, Phase.PREFILL) == ["a"]
    nodes.on_hello(hello("b"), 0)
    assert serving(nodes, Phase.PREFILL) == ["a", "b"]
    nodes.check()


def test_cluster_that_is_gone_may_come_back_as_another() -> None:
    nodes = known("a")
    nodes.on_hello(hello("b", model="other"), 10)
    nodes.on_telemetry(beat("b"), 10)
    assert serving(nodes, Phase.PREFILL, 10) == ["b"]


def test_node_that_is_not_ready_gets_nothing() -> None:
    nodes = Nodes(3)
    nodes.on_telemetry(beat(), 0)
    assert serving(nodes, Phase.PREFILL) == []
