"""Why blocks whose keys are known cannot be supplied: what the last copy of each came to."""

from __future__ import annotations

from schemas.directory import Absence, AbsenceReason
from services.directory.core import spans as sets
from services.directory.core.run import Run, Tip
from services.directory.core.spans import Spans


def note(run: Run, blocks: Spans, reason: AbsenceReason) -> None:
    """Copies of these blocks left for this reason; of what was evicted, what an active branch claims is told apart."""
    if reason is AbsenceReason.EVICTED:
        top = max((ends.top for ends in run.claims.values()), default=0)
        claims = [0, top] if top else []
        for kept in run.kept.values():
            for i in range(0, len(kept), 2):
                sets.add(claims, kept[i], kept[i + 1])
        claimed = sets.both(blocks, claims)
        _set(run, claimed, AbsenceReason.EVICTED_REFERENCED)
        blocks = sets.minus(blocks, claimed)
    _set(run, blocks, reason)


def trim(run: Run, kept: int) -> None:
    """The run forgot its blocks from offset `kept` on."""
    for blocks in run.gone.values() if run.gone is not None else ():
        if blocks and blocks[-1] > kept:
            sets.remove(blocks, kept, blocks[-1])


def absent(tips: list[Tip], blocks: int) -> list[Absence]:
    """The blocks of a path from number `blocks` on, in pieces by reason. Cost: the holdings of its runs."""
    found: list[Absence] = []
    start = 0
    for run, used in tips:
        if start + used > blocks:
            _add(found, run, max(0, blocks - start), used, start)
        start += used
    return found


def _set(run: Run, blocks: Spans, reason: AbsenceReason) -> None:
    if not blocks:
        return
    if run.gone is None:
        run.gone = {}
    for other, noted in run.gone.items():
        if other is not reason:
            for i in range(0, len(blocks), 2):
                sets.remove(noted, blocks[i], blocks[i + 1])
    noted = run.gone.setdefault(reason, [])
    for i in range(0, len(blocks), 2):
        sets.add(noted, blocks[i], blocks[i + 1])


def _add(found: list[Absence], run: Run, first: int, last: int, start: int) -> None:
    """Append the reasons of offsets [first, last) of a run whose first block is number `start`."""
    left: Spans = [first, last]
    pieces: list[tuple[int, int, AbsenceReason]] = []

    def take(blocks: Spans, reason: AbsenceReason) -> None:
        nonlocal left
        part = sets.both(left, blocks)
        pieces.extend((part[i], part[i + 1], reason) for i in range(0, len(part), 2))
        left = sets.minus(left, part)

    for holding, held in run.held.items():
        if holding.live:
            take(held, AbsenceReason.UNREACHABLE)
    for holding, held in run.held.items():
        if not holding.live and holding.ended is not None:
            take(held, holding.ended)
    for reason, noted in run.gone.items() if run.gone is not None else ():
        take(noted, reason)
    take([first, last], AbsenceReason.NEVER_STORED)
    for begin, end, reason in sorted(pieces):
        if found and found[-1].last == start + begin and found[-1].reason is reason:
            begin = found.pop().first - start
        found.append(Absence(first=start + begin, last=start + end, reason=reason))
