"""The garbage collector beside a router: it does not walk the program."""

import subprocess
import sys

PROGRAM = """
import gc
from services.router import __main__
from services.router.collector import OLD, MIDDLE, YOUNG, collect_rarely
collect_rarely()
assert gc.get_freeze_count() > 10_000 > len(gc.get_objects()), (gc.get_freeze_count(), len(gc.get_objects()))
assert gc.get_threshold() == (YOUNG, MIDDLE, OLD)
"""


def test_a_router_process_is_set_up_once() -> None:
    """In a process of its own: the collector is one for all."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
