"""How much of what the core puts off is done between two turns of the loop."""

import time

from services.directory.core.directory import Directory
from services.directory.core.effects import Effect

HELPING_S = 0.001
"""The longest piece takes about 3 ms beyond it: a part of the key index is merged."""


def helping(core: Directory) -> list[Effect]:
    """Do pieces of work until HELPING_S are over; what came of them."""
    until = time.perf_counter() + HELPING_S
    effects = core.work(1)
    while core.has_work and time.perf_counter() < until:
        effects += core.work(1)
    return effects
