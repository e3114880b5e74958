"""The garbage collector beside a directory: it has nothing to find there, and looks at what is new only."""

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest
from directory_bench import Bench, chain, removed, stored

from schemas.branch import BranchEventType
from schemas.phase import Phase


@pytest.fixture
def garbage() -> Iterator[list[object]]:
    """What a collection finds, kept; none comes by itself."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_what_a_directory_forgets_makes_no_cycles(garbage: list[object]) -> None:
    bench = Bench(remember_blocks=4, inactive_branches=2)
    common = chain("system", "tools")
    bench.say("p1", 1, stored(common))
    for number in range(8):
        keys = chain("system", "tools", f"task {number}", "more", "and more")
        name, node = f"b{number}", f"n{number}"
        bench.say("p1", 2 + 2 * number, stored(keys[2:], keys[1]))
        bench.match(keys, branch=name)
        bench.answered(name, keys, "p1", node)
        bench.say(node, 1, stored(keys[3:], keys[2]))
        bench.tell(f"f{number}", BranchEventType.FORK, parent=name)
        bench.switch(node, Phase.PREFILL, 1)
        bench.tell(name, BranchEventType.END)
        bench.say("p1", 3 + 2 * number, removed(keys[2:]))
        bench.tick(4.0)
    assert bench.core.tree.blocks < 8 * 3
    gc.collect()
    assert [found for found in garbage if type(found).__module__.startswith("services.directory")] == []


def test_a_long_collection_is_the_last_of_what_it_saw() -> None:
    """In a process of its own: the collector is one for all."""
    code = """
import gc
from services.directory import collector
kept = collector.ShortCollections()
frozen = gc.get_freeze_count()
assert frozen > 1_000
collector.LONGEST_S = 0.0
new = [[] for _ in range(100_000)]
assert gc.get_freeze_count() > frozen + 50_000, gc.get_freeze_count()
assert len(gc.get_objects()) < 60_000
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
