"""Dynamo 1.6.1: planner with its guarded budget, KV router, and a host tier per worker.

Planner: `dynamo_planner` with 1.6.1's guard (at the full budget only an opposing pair of wishes moves a node) and its
check that a removed worker's load would not ask for it again. Routing: `dynamo_router`, host blocks credited with 0.75.
Host tier: KVBM or HiCache, LRU, per worker, one copy of replicated KV for all ranks (upstream now), loaded when
prefill starts. Without it (`Dynamo161Device`) a worker has device memory only. Switch as in `dynamo_kv_router`: the
worker restarts and its KV is lost.

Approximate: conditional disaggregation, queue thresholds and session affinity are off as by default; admission and
migration limits are not modelled.
"""

from services.simulator.system import SwitchCost, Traits
from services.simulator.systems.dynamo_kv_router import RELAUNCH_S, DynamoKvRouter
from services.simulator.systems.dynamo_planner import guard_1_6_1

NO_HOST_TIER = 1 << 40
"""Copies of a token in host memory, so many that none fits."""


class Dynamo161(DynamoKvRouter):
    """With a host tier per worker."""

    id = "dynamo-1.6.1"
    traits = Traits(token_after_transfer=True, switch=SwitchCost(relaunch_s=RELAUNCH_S, keeps_kv=False))
    budget = staticmethod(guard_1_6_1)
    consolidates = True


class Dynamo161Device(Dynamo161):
    """Without a host tier."""

    id = "dynamo-1.6.1-device"
    traits = Traits(
        token_after_transfer=True,
        host_copies=NO_HOST_TIER,
        switch=SwitchCost(relaunch_s=RELAUNCH_S, keeps_kv=False),
    )
