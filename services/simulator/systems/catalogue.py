"""Compared systems by the id under which reports and `--system` know them."""

from collections.abc import Callable
from functools import partial

from services.simulator.system import System
from services.simulator.systems.ablated import ALONE, CUMULATIVE, NO_FETCH, Ablated, name_of
from services.simulator.systems.arrow import Arrow
from services.simulator.systems.dynamo_1_5_1 import Dynamo151
from services.simulator.systems.dynamo_1_6_1 import Dynamo161, Dynamo161Device
from services.simulator.systems.dynamo_kv_router import DynamoKvRouter
from services.simulator.systems.llumnix import Llumnix
from services.simulator.systems.mooncake import Mooncake
from services.simulator.systems.own import Own
from services.simulator.systems.pool_lru import PoolLru
from services.simulator.systems.reload import Reload
from services.simulator.systems.sglang_role_switch import SglangRoleSwitch
from services.simulator.systems.smg_cache_aware import SmgCacheAware
from services.simulator.systems.smg_least_load import SmgLeastLoad
from services.simulator.systems.static import Static
from services.simulator.systems.sticky import Sticky
from services.simulator.systems.thunderagent import ThunderAgent
from services.simulator.systems.variants import ours_for_ttft, reference, static_own

SYSTEMS: dict[str, Callable[[], System]] = {
    "ours": Own,
    "ours-ttft-15": partial(ours_for_ttft, 15.0),
    "ours-reload": Reload,
    "reference": reference,
    "static": Static,
    "static-own": static_own,
    "static-own-reload": partial(Reload, planner=False),
    "dynamo-1.5.1": Dynamo151,
    "sticky": Sticky,
    "smg-cache-aware": SmgCacheAware,
    "smg-least-load": SmgLeastLoad,
    "dynamo-kv-router": DynamoKvRouter,
    "dynamo-kv-router-fixed": partial(DynamoKvRouter, planner=False),
    "dynamo-1.6.1": Dynamo161,
    "dynamo-1.6.1-device": Dynamo161Device,
    "arrow": Arrow,
    "mooncake": Mooncake,
    "thunderagent": ThunderAgent,
    "llumnix": Llumnix,
    "sglang-role-switch": SglangRoleSwitch,
    "pool-lru": PoolLru,
    **{name_of(parts): partial(Ablated, parts) for parts in (*CUMULATIVE, *ALONE, NO_FETCH)},
}

FIXED_SPLIT = frozenset(
    {
        "static",
        "static-own",
        "static-own-reload",
        "sticky",
        "smg-cache-aware",
        "smg-least-load",
        "dynamo-kv-router-fixed",
        "mooncake",
        "thunderagent",
        "pool-lru",
    }
)
"""Systems that never change the split: they are run at the best one, which a search finds."""
