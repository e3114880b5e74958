"""Our simulator's side of the comparison: a system of the catalogue under the sessions of `peer_dynamo_trace`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.peer_dynamo_figures import Served, figures
from bench.peer_dynamo_trace import Loop, Session
from schemas.phase import Phase, Split
from services.simulator.call import Call
from services.simulator.hardware import PROFILES
from services.simulator.record import Recorder
from services.simulator.system import Cluster, NodeView, SwitchCost, System
from services.simulator.systems.dynamo_1_6_1 import Dynamo161, Dynamo161Device
from services.simulator.systems.dynamo_planner import DynamoPlanner
from services.simulator.systems.signals import prefilled, waits
from services.simulator.world import World

HARDWARE = "dynamo-mocker"


@dataclass(frozen=True, slots=True)
class Load:
    """How both sides are driven: `width` sessions at a time, answers in [warm_up_s, ends_s) count."""

    width: int
    warm_up_s: float
    ends_s: float


def simulate(system: System, split: str, sessions: Sequence[Session], load: Load, seed: int) -> dict[str, Any]:
    """The figures of one run."""
    recorder = Recorder()
    world = World(PROFILES[HARDWARE], Split.parse(split), system, seed=seed, watch=recorder)
    loop = Loop(sessions, load.width, world.agenda, world.arrive)
    world.finished = loop.answered
    world.agenda.run(load.ends_s)
    served = [
        Served(call.arrived_at, call.first_token_at, call.ended_at, call.prompt_tokens, call.cached_tokens)
        for call in recorder.calls
        if call.first_token_at is not None and call.ended_at is not None
    ]
    moves = sum(len(switch.nodes) or 1 for switch in world.switches if switch.counts)
    return {**figures(served, load.warm_up_s, load.ends_s), "switches": float(moves), "split": world.split}


def queued_for_decode(node: NodeView) -> list[Call]:
    """Requests placed on a decode worker that have no room there beside those that decode, answers included."""
    waiting = [call for call in node.decode_calls.values() if not prefilled(call)]
    promised = sum(call.prompt_tokens + call.output_tokens for call in node.decode_calls.values() if prefilled(call))
    return [call for call in waiting if promised + call.prompt_tokens + call.output_tokens > node.l1_tokens]


def _signal_as_the_replay(planner: DynamoPlanner, cluster: Cluster) -> None:
    """Requests for a full decode worker wait there in the replay, prefilled; here they wait before their prefill.

    What waits for prefill is in no decode queue there (the file's workers are SGLang's, where it is).
    """

    def queued(node: NodeView) -> int:
        elsewhere = {call.id for other in cluster.serving(Phase.DECODE) for call in queued_for_decode(other)}
        calls = [call for call in node.prefill_calls.values() if waits(call) and call.id not in elsewhere]
        return sum(call.prompt_tokens for call in calls)

    def decode_kv(node: NodeView) -> int:
        return node.decode_kv + sum(call.prompt_tokens for call in queued_for_decode(node))

    planner.queued, planner.decode_kv = queued, decode_kv


class _AsTheReplay(Dynamo161):
    """Our file of Dynamo 1.6.1 with the replay's signals."""

    def begin(self, cluster: Cluster, now: float) -> None:
        super().begin(cluster, now)
        if self.planner is not None:
            _signal_as_the_replay(self.planner, cluster)


def dynamo(*, host: bool, planner: bool, startup_s: float = 0.0) -> System:
    """Our file of Dynamo 1.6.1, with its start-up time as the replay is given it."""
    system = _AsTheReplay(planner=planner)
    cost = SwitchCost(relaunch_s=(startup_s, startup_s), keeps_kv=False)
    system.traits = replace((Dynamo161 if host else Dynamo161Device).traits, switch=cost)
    return system
