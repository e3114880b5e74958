"""How much of what the core puts off is done between two turns of the loop."""

import time
from collections.abc import Iterator

from services.directory.core.checkpoint import Part, Saving
from services.directory.core.directory import Directory
from services.directory.core.effects import Effect

HELPING_S = 0.001
"""The longest piece takes about 3 ms beyond it: a part of the key index is merged."""
_DONE = object()


def helping(core: Directory) -> list[Effect]:
    """Do pieces of work until HELPING_S are over; what came of them."""
    until = time.perf_counter() + HELPING_S
    effects = core.work(1)
    while core.has_work and time.perf_counter() < until:
        effects += core.work(1)
    return effects


def helpings_of(pieces: Iterator[None]) -> Iterator[None]:
    """The same pieces, as many to one as HELPING_S allow."""
    while next(pieces, _DONE) is not _DONE:
        until = time.perf_counter() + HELPING_S
        while time.perf_counter() < until and next(pieces, _DONE) is not _DONE:
            pass
        yield


def helping_saved(saving: Saving, sequence: int, now: float, wall: float) -> Part:
    """Take pieces of a checkpoint until HELPING_S are over; the last part, as of this turn, if that is all."""
    until = time.perf_counter() + HELPING_S
    while saving.step():
        if time.perf_counter() >= until:
            return saving.take()
    return saving.end(sequence, now, wall)
