"""A context that goes to the device ahead of its branch's next request, and what of loading is exposed."""

from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from schemas.phase import Split
from services.simulator.agents import Agents, Mix
from services.simulator.call import Call
from services.simulator.hardware import PROFILES
from services.simulator.node import Node
from services.simulator.record import Recorder
from services.simulator.systems.own import Own
from services.simulator.systems.reload import Reload
from services.simulator.systems.static import Static
from services.simulator.trace import load_trace
from services.simulator.world import World
from tests.system_stage import BLOCK, call

BLOCKS = 512
GLM = replace(PROFILES["glm-5.2/h200"], l1_tokens=2 * BLOCKS * BLOCK)
LOAD_S = GLM.restore_s(BLOCKS * BLOCK)


def node() -> Node:
    """A prefill node whose device holds two contexts of `BLOCKS` blocks."""
    return World(GLM, Split.parse("1P1D"), Own()).node("n0")


def context(first: int = 1 << 20) -> "array[int]":
    return array("Q", range(first, first + BLOCKS))


def request(keys: "array[int]", branch: str = "b") -> Call:
    return call(BLOCKS * BLOCK + 1, keys=keys, branch=branch)


def began(on: Node, of: Call, now: float) -> float:
    """Let a call load its prefix; when it is there."""
    on.prefixes.begin(of)
    return on.prefixes.load(of, now)[1]


def test_what_was_brought_ahead_is_not_loaded_again() -> None:
    on, keys = node(), context()
    on.memory.write_host(keys, 0, BLOCKS, 0.0)
    assert on.prefixes.preload("b", keys, (), 1.0) == BLOCKS * BLOCK
    assert on.prefixes.preload("b", keys, (), 1.0) == 0, "all of it is there or on its way"
    late = request(keys)
    assert began(on, late, 2.0) == 2.0
    assert (late.preloaded_tokens, late.restored_tokens) == (BLOCKS * BLOCK, 0)
    on.check()


def test_a_request_waits_for_the_rest_of_an_upload_under_way() -> None:
    on, keys = node(), context()
    on.memory.write_host(keys, 0, BLOCKS, 0.0)
    on.prefixes.preload("b", keys, (), 1.0)
    early = request(keys)
    assert began(on, early, 1.0 + LOAD_S / 4) == pytest.approx(1.0 + LOAD_S)
    assert early.restore_s == pytest.approx(LOAD_S * 3 / 4)


def test_without_it_the_whole_prefix_is_loaded() -> None:
    on, keys = node(), context()
    on.memory.write_host(keys, 0, BLOCKS, 0.0)
    alone = request(keys)
    assert began(on, alone, 2.0) == pytest.approx(2.0 + LOAD_S)
    assert (alone.preloaded_tokens, alone.restored_tokens) == (0, BLOCKS * BLOCK)


def test_promised_device_memory_is_not_taken() -> None:
    on, keys = node(), context()
    on.memory.write_host(keys, 0, BLOCKS, 0.0)
    on.memory.promise(BLOCKS + 1)
    assert on.prefixes.preload("b", keys, (), 1.0) == 0
    assert on.prefixes.restores.busy_s == 0.0


def test_a_prefix_in_use_stays_and_an_unused_one_goes() -> None:
    on, used, idle, new = node(), context(1 << 20), context(1 << 21), context(1 << 22)
    for keys in (used, new):
        on.memory.write_host(keys, 0, BLOCKS, 0.0)
    running = request(used, "running")
    began(on, running, 1.0)
    on.memory.promised = 0
    on.memory.write_device(idle, 0, BLOCKS, 2.0)
    assert on.prefixes.preload("b", new, (running,), 3.0) == BLOCKS * BLOCK
    assert [on.memory.l1.reach(keys, 0, BLOCKS) for keys in (used, idle, new)] == [BLOCKS, 0, BLOCKS]


def test_a_branch_that_does_not_come_is_overwritten() -> None:
    on, keys, other = node(), context(), context(1 << 21)
    on.memory.write_host(keys, 0, BLOCKS, 0.0)
    on.prefixes.preload("b", keys, (), 1.0)
    on.memory.promise(2 * BLOCKS)
    on.memory.promised = 0
    on.memory.write_device(other, 0, BLOCKS, 2.0)
    late = request(keys)
    began(on, late, 3.0)
    assert (late.preloaded_tokens, late.restored_tokens) == (0, BLOCKS * BLOCK)


@pytest.mark.parametrize(("computed_at", "exposed_s"), [(0.0, LOAD_S), (2.0 + LOAD_S / 4, LOAD_S * 3 / 4), (9.0, 0.0)])
def test_loading_is_exposed_while_the_device_has_nothing_to_compute(computed_at: float, exposed_s: float) -> None:
    on, keys = node(), context()
    on.memory.write_host(keys, 0, BLOCKS, 0.0)
    of = request(keys)
    on.prefixes.begin(of)
    item, come = on.prefixes.load(of, 2.0)
    on.prefixes.computed_at = computed_at
    assert on.prefixes.load_at_start(item, GLM.times, max(come, computed_at)) == 0.0
    assert of.fetch_exposed_s == pytest.approx(exposed_s)


def played(system: Own | Static) -> Recorder:
    recorder = Recorder()
    world = World(replace(GLM, l1_tokens=300_000), Split.parse("1P2D"), system, seed=3, watch=recorder)
    players = Agents(world.agenda, world.arrive, 3)
    world.finished = players.answered
    trace = load_trace(Path("data/traces/cc_smoke.btrace.jsonl.gz"))
    players.add(Mix(trace, agents=8, max_pause_s=20.0, ramp_s=20.0))
    world.agenda.run(400.0)
    world.check()
    return recorder


def test_reload_brings_contexts_ahead_and_some_of_them_are_used() -> None:
    recorder = played(Reload(planner=False))
    used = sum(each.preloaded_tokens for each in recorder.calls)
    assert 0 < used <= recorder.preloaded_tokens
    assert all(each.preloaded_tokens <= each.cached_tokens for each in recorder.calls)
    assert all(each.fetch_exposed_s <= each.fetch_s + each.restore_s + 1e-9 for each in recorder.calls)
    assert played(Static()).preloaded_tokens == 0
