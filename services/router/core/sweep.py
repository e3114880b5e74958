"""Predicted time to first token on all nodes at once: the rules of `placement.predict`, over arrays.

Row 0 of the two-row arrays is the plan with fetches from peers, row 1 the node's own part alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from schemas.directory import Piece
from services.router.core.placement import (
    RECOMPUTE_GAIN_S,
    TIE_S,
    Candidate,
    FetchCost,
    Prompt,
)
from services.router.core.prefix import local_prefix, shared_prefix
from services.router.core.roster import Floats, Mask, Roster
from services.router.core.timing import Work

FetchRow = Callable[[str], tuple[Floats | float, Floats | float]]
"""Source node -> (tokens per second, latency in seconds) to every node of the roster."""


@dataclass(frozen=True, slots=True)
class _Prefixes:
    """Leading blocks each plan reuses (2, nodes), those on the device, tokens fetched and how long it takes; `fetches`:
    whether any node would."""

    blocks: Floats
    device: Floats
    fetched: Floats
    fetch_s: Floats
    fetches: bool


class Sweep(Sequence[Candidate]):
    """The prediction for every node of `rows`, in order of name; one is made a `Candidate` when it is looked at."""

    def __init__(
        self,
        prompt: Prompt,
        roster: Roster,
        rows: Mask,
        usable: Mask,
        fetch: FetchRow,
        waits: Callable[[Floats], tuple[Floats, Floats]],
    ) -> None:
        """`rows`: nodes to predict for. `usable`: nodes whose host memory may be read. `waits`: service seconds of the
        request on every node -> (rest of the running batch, queue before it)."""
        self._prompt, self._names = prompt, roster.names
        self._index, self._usable = roster.index, usable
        self._rows = np.flatnonzero(rows)
        plans = _prefixes(prompt, roster, usable, fetch)
        service = _service(prompt, roster, plans)
        duplicate = _duplicate(prompt, roster, plans)
        self.remaining_s, self.queue_s = waits(np.minimum(service[0], service[1]))
        wait = self.remaining_s + self.queue_s
        self.service_s, self._service_alone = service[0], service[1]
        self._fetch_s, self._duplicate_s = plans.fetch_s, duplicate
        self.ttft_s = wait + service[0]
        self._alone = None
        if plans.fetches:
            whole = self.ttft_s + np.maximum(0.0, plans.fetch_s - wait) + duplicate
            alone = wait + service[1]
            self._alone = (plans.fetched > 0) & (alone + RECOMPUTE_GAIN_S < whole)
            self.ttft_s = np.where(self._alone, alone, whole)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at: int) -> Candidate:  # type: ignore[override]
        return self._candidate(int(self._rows[at]))

    def __iter__(self) -> Iterator[Candidate]:
        return (self._candidate(int(row)) for row in self._rows)

    def best(self, turn: int) -> Candidate:
        """The smallest predicted TTFT; `turn` rotates among equals. ValueError without nodes."""
        times = self.ttft_s[self._rows]
        if not len(times):
            raise ValueError("no node to choose from")
        equal = np.flatnonzero(times <= times.min() + TIE_S)
        return self[int(equal[turn % len(equal)])]

    def first(self, count: int) -> list[Candidate]:
        """The best `count`, best first."""
        order = np.argsort(self.ttft_s[self._rows], kind="stable")[:count]
        return [self[int(at)] for at in order]

    def least_alone_s(self) -> float:
        """The shortest time in which one of the nodes would compute the request by itself, its queue left aside."""
        return float(np.minimum(self.service_s, self._service_alone)[self._rows].min())

    def _candidate(self, row: int) -> Candidate:
        prompt, name = self._prompt, self._names[row]
        alone = self._alone is not None and bool(self._alone[row])
        if alone:
            prefix = local_prefix(name, prompt.match, prompt.limit)
        else:
            prefix = shared_prefix(name, prompt.match, prompt.limit, self._readable)
        cached = prefix.blocks * prompt.block_size
        work = Work(prompt.tokens - cached, cached, (prefix.blocks - prefix.device) * prompt.block_size)
        return Candidate(
            name,
            float(self.remaining_s[row]),
            float(self.queue_s[row]),
            float((self._service_alone if alone else self.service_s)[row]),
            0.0 if alone else float(self._fetch_s[row]),
            0.0 if alone else float(self._duplicate_s[row]),
            work,
            prefix.fetch,
        )

    def _readable(self, name: str) -> bool:
        row = self._index.get(name)
        return row is not None and bool(self._usable[row])


def _prefixes(prompt: Prompt, roster: Roster, usable: Mask, fetch: FetchRow) -> _Prefixes:
    """What every node can reuse, walking the pieces once for all of them (`prefix.shared_prefix` for one).

    Pieces do not overlap, so a node that a gap or a missing source has stopped is stopped for good: the next piece
    begins after its end.
    """
    match, limit, count, index = prompt.match, prompt.limit, len(roster), roster.index
    leading, own = [0] * count, [0] * count
    for node in match.nodes:
        row = index.get(node.node)
        if row is not None:
            leading[row] = min(node.l1_blocks, limit)
            own[row] = max(leading[row], min(node.l2_blocks, limit))
    if match.pending_node is not None and (row := index.get(match.pending_node)) is not None:
        leading[row] = max(leading[row], min(match.pending_blocks, limit))
        own[row] = max(own[row], leading[row])
    end = np.array(own, float)
    fetched, fetch_s, source, fetches = np.zeros(count), np.zeros(count), np.full(count, -1), False
    for piece in sorted(match.pieces, key=_first):
        first, last = piece.first, min(piece.last, limit)
        rows = [row for row in map(index.get, piece.nodes) if row is not None]
        for row in rows:
            if first <= own[row] < last:
                own[row] = last
        active = end < last
        if first:
            active &= end >= first
        peer = next((row for row in rows if usable[row]), None)
        if peer is None:
            active &= _members(rows, count)
        elif np.count_nonzero(active):
            moved = active.copy()
            moved[rows] = False
            if np.count_nonzero(moved):
                fetches = True
                tokens = (last - end) * moved * float(prompt.block_size)
                rate, latency = fetch(roster.names[peer])
                fetched += tokens
                fetch_s += tokens / rate + moved * (source != peer) * latency
            np.copyto(source, -1, where=active)
            np.copyto(source, peer, where=moved)
        np.copyto(end, float(last), where=active)
    return _Prefixes(np.stack([end, np.array(own, float)]), np.array(leading, float), fetched, fetch_s, fetches)


def _members(rows: list[int], count: int) -> Mask:
    mask = np.zeros(count, bool)
    mask[rows] = True
    return mask


def _first(piece: Piece) -> int:
    return piece.first


def _service(prompt: Prompt, roster: Roster, plans: _Prefixes) -> Floats:
    """T_req of both plans on every node, (2, nodes)."""
    rows, size = roster.prefill, prompt.block_size
    cached = plans.blocks * size
    uncached = prompt.tokens - cached
    seconds: Floats = (rows.c1 + rows.c2 * (cached + (uncached + 1) / 2) + rows.c0_share) * uncached
    seconds += rows.c0_each
    seconds += rows.c3 * (cached - plans.device * size)
    if roster.knees:
        seconds += rows.c5 * np.maximum(0.0, uncached - rows.u0)
    return seconds


def _duplicate(prompt: Prompt, roster: Roster, plans: _Prefixes) -> Floats:
    """C_dup of the fetch on every node (`placement.duplicate_s` for one)."""
    rows, fetched = roster.prefill, plans.fetched
    if not plans.fetches or not np.count_nonzero(fetched > rows.total - rows.used):
        return np.zeros(len(roster))
    share = np.minimum(1.0, rows.referenced / np.maximum(rows.used, 1.0))
    for name, known in prompt.match.referenced_share.items():
        row = roster.index.get(name)
        if row is not None:
            share[row] = known
    free = np.maximum(0.0, rows.total - rows.used)
    pays = (fetched > 0) & (rows.used > 0) & (fetched > rows.total - rows.used * share)
    seconds: Floats = np.where(pays, np.maximum(0.0, fetched - free) * share * (rows.c1 + rows.c0_share), 0.0)
    return seconds


def uniform(cost: FetchCost) -> FetchRow:
    """The same rate and latency between all nodes."""
    return lambda _: (cost.tokens_per_s, cost.latency_s)


def best_of(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """The best `count`, best first, of predictions however they are kept."""
    if isinstance(candidates, Sweep):
        return candidates.first(count)
    return sorted(candidates, key=lambda found: found.ttft_s)[:count]
