"""Every compared system on a small simulated cluster: nobody is forgotten, and what it is known for shows."""

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from schemas.phase import Split
from services.simulator.agents import Agents, Mix
from services.simulator.hardware import PROFILES
from services.simulator.record import Recorder
from services.simulator.system import System
from services.simulator.systems.arrow import Arrow
from services.simulator.systems.catalogue import SYSTEMS
from services.simulator.systems.dynamo_kv_router import DynamoKvRouter
from services.simulator.systems.llumnix import Llumnix
from services.simulator.systems.pool_lru import PoolLru
from services.simulator.systems.smg_least_load import SmgLeastLoad
from services.simulator.systems.sticky import Sticky
from services.simulator.systems.thunderagent import ThunderAgent
from services.simulator.trace import load_trace
from services.simulator.world import World

TRACE = load_trace(Path(__file__).parents[2] / "data/traces/cc_smoke.btrace.jsonl.gz")
SMALL = replace(PROFILES["glm-5.2/gb300"], l1_tokens=1_200_000, l2_tokens=4_000_000)


@dataclass
class Run:
    """A finished run and what became of its requests."""

    world: World
    log: Recorder
    agents: Agents
    system: Any

    @property
    def lost(self) -> float:
        """Share of the reusable prompt tokens that were computed again."""
        block = self.world.block_tokens
        ideal = sum(call.ideal_blocks * block for call in self.log.calls)
        return 1.0 - sum(min(call.cached_tokens, call.ideal_blocks * block) for call in self.log.calls) / ideal


def run(system: System, split: str = "2P2D", agents: int = 12, seconds: float = 240.0, **hardware: Any) -> Run:
    log = Recorder()
    world = World(replace(SMALL, **hardware), Split.parse(split), system, seed=3, watch=log)
    players = Agents(world.agenda, world.arrive, 3)
    world.finished = players.answered
    players.add(Mix(TRACE, agents=agents, max_pause_s=22.0, ramp_s=30.0))
    for second in range(30, int(seconds) + 1, 30):
        world.agenda.run(float(second))
        world.check()
    return Run(world, log, players, system)


@lru_cache
def of(name: str) -> Run:
    return run(SYSTEMS[name]())


@pytest.mark.parametrize("name", [name for name in SYSTEMS if not name.startswith("plain+")])
def test_all_agents_advance_to_the_end(name: str) -> None:
    done = of(name)
    late = [call for call in done.log.calls if call.ended_at and call.ended_at > 180.0]
    assert len({call.agent for call in late}) >= 9, "of 12, some wait on tools"
    assert all(call.uncached_tokens > 0 for call in done.log.calls)
    assert done.world.open_calls <= 40
    for call in done.log.calls:
        assert call.first_token_at is not None
        assert call.ended_at is not None
        assert call.arrived_at <= call.first_token_at <= call.ended_at


@pytest.mark.parametrize("name", ["arrow", "dynamo-1.6.1", "mooncake"])
def test_the_same_seed_gives_the_same_run(name: str) -> None:
    again = run(SYSTEMS[name](), seconds=90.0)
    before = [call.ended_at for call in of(name).log.calls if call.ended_at and call.ended_at <= 90.0]
    assert [call.ended_at for call in again.log.calls] == before


def test_a_session_stays_on_one_node_and_loses_nothing() -> None:
    done = run(Sticky(), "3P1D")
    nodes: dict[str, set[str | None]] = {}
    for call in done.log.calls:
        nodes.setdefault(call.agent, set()).add(call.prefill_node)
    assert all(len(each) == 1 for each in nodes.values())


def test_routing_by_load_alone_loses_reuse_that_a_shared_pool_keeps() -> None:
    by_load, pooled = run(SmgLeastLoad(), "3P1D"), run(PoolLru(), "3P1D", seconds=120.0)
    assert by_load.lost > 0.05
    assert pooled.lost < 0.01
    assert sum(call.fetched_tokens for call in pooled.log.calls) > 0


def test_arrow_relabels_at_once_and_loses_reuse() -> None:
    done = run(Arrow(), "3P3D")
    assert done.world.switches
    first = done.world.switches[0]
    assert first.started_at < 60.0
    assert done.lost > 0.05


def test_a_restarted_worker_is_away_for_the_whole_relaunch() -> None:
    done = run(DynamoKvRouter(), "3P2D", agents=6, seconds=900.0, l1_tokens=250_000)
    switches = [(each.started_at, each.ended_at) for each in done.world.switches if each.ended_at is not None]
    away = [(started, ended) for started, ended in switches if ended - started > 60.0]
    assert away, "a worker was started on a node"
    for started, ended in away:
        assert 666.0 <= ended - started <= 831.0
        assert not [other for other, _ in switches if started < other < ended], "one at a time"


def test_llumnix_migrates_from_a_full_decode_node() -> None:
    done = run(Llumnix(scaling=False), "3P2D", agents=24, l1_tokens=500_000)
    assert done.system.migrations > 0


def test_programs_are_paused_when_their_contexts_exceed_the_backends() -> None:
    tight = run(ThunderAgent(), "2P2D", agents=24, l1_tokens=400_000, l2_tokens=1_600_000)
    assert tight.system.pauses > 0
    assert of("thunderagent").system.pauses == 0


def test_parts_of_the_product_do_what_they_say_on_the_plain_base() -> None:
    routed, pooled = (
        run(SYSTEMS["plain+routing"](), "2P2D", seconds=120.0),
        run(SYSTEMS["plain+pool"](), "2P2D", seconds=120.0),
    )
    assert not any(call.fetched_tokens for call in routed.log.calls), "without the pool peers are out of reach"
    waited = [call for call in pooled.log.calls if call.fetch_exposed_s > 0.0]
    assert waited, "loaded at prefill start, a fetch holds the device up"
    assert sum(call.fetched_tokens for call in pooled.log.calls) > 0
    hidden = run(SYSTEMS["plain+pool+fetch"](), "2P2D", seconds=120.0)
    at_start_s, waiting_s = (sum(call.fetch_exposed_s for call in of.log.calls) for of in (pooled, hidden))
    assert waiting_s < at_start_s
    nodes = {name: node.l2_tokens for name, node in routed.world.nodes.items()}
    assert {name: node.l2_tokens for name, node in pooled.world.nodes.items()} == {n: 4 * t for n, t in nodes.items()}
