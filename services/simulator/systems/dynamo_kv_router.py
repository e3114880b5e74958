"""Dynamo 1.5.1 with its own KV router in front of the same nodes as `dynamo-1.5.1`.

Planner and budget: `dynamo_planner` (1.5.1's clamp); routing: `dynamo_router`. A switch restarts the worker: 666 to
831 s out of service (what the reference measured), its device and host KV lost. Nodes are plain SGLang's: HiCache with
LRU per node, loaded when prefill starts, nothing kept by decode nodes. Approximate: router state is never stale.
"""

from collections.abc import Sequence

from schemas.phase import Phase
from services.simulator.call import Call
from services.simulator.passive import Passive
from services.simulator.system import Action, Place, SwitchCost, Traits
from services.simulator.systems.dynamo_planner import Budget, DynamoPlanner, clamp_1_5_1
from services.simulator.systems.dynamo_router import KvRouter

RELAUNCH_S = (666.0, 831.0)


class DynamoKvRouter(Passive):
    """Planner 1.5.1 (none if not `planner`: a fixed split) and the KV router."""

    id = "dynamo-kv-router"
    traits = Traits(token_after_transfer=True, host_copies=4, switch=SwitchCost(relaunch_s=RELAUNCH_S, keeps_kv=False))
    budget: Budget = staticmethod(clamp_1_5_1)
    consolidates = False

    def __init__(self, *, planner: bool = True) -> None:
        self.router = KvRouter()
        self.planner = DynamoPlanner(self.budget, consolidates=self.consolidates) if planner else None
        self._held: dict[str, Call] = {}

    def arrived(self, call: Call, now: float) -> Sequence[Action]:
        prefill, decode = self.cluster.serving(Phase.PREFILL), self.cluster.serving(Phase.DECODE)
        if not prefill or not decode:
            self._held[call.id] = call
            return ()
        self.router.prefilled(call)
        return (
            Place(call, self.router.prefill(call, prefill, self.cluster), self.router.decode(decode, self.cluster)),
        )

    def prefilled(self, call: Call, now: float) -> Sequence[Action]:
        self.router.prefilled(call)
        return ()

    def moved(self, node: str, now: float) -> Sequence[Action]:
        if self.planner is not None:
            self.planner.joined(node, now)
        held, self._held = self._held, {}
        return [action for call in held.values() for action in self.arrived(call, now)]

    def next_wake(self, now: float) -> float | None:
        return None if self.planner is None else self.planner.due

    def wake(self, now: float) -> Sequence[Action]:
        return () if self.planner is None else self.planner.tick(self.cluster, now)
