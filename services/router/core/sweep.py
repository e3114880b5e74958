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
    Prompt,
)
from services.router.core.prefix import local_prefix, shared_prefix
from services.router.core.roster import Floats, Holders, Mask, Roster

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


@dataclass(frozen=True, slots=True)
class Resumes:
    """Decode nodes that hold a request's KV: which, and how many requests decode on each."""

    nodes: Mask
    running: Floats

    def delay_s(self, service_s: Floats) -> Floats:
        """What a prefill there costs those who decode meanwhile, added up."""
        delays: Floats = np.where(self.nodes, service_s * self.running, 0.0)
        return delays


class Sweep(Sequence[Candidate]):
    """The prediction for every node of `rows`, in order of name; one is made a `Candidate` when it is looked at."""

    def __init__(
        self,
        prompt: Prompt,
        holders: Holders,
        roster: Roster,
        rows: Mask,
        usable: Mask,
        fetch: FetchRow,
        waits: Callable[[Floats], tuple[Floats, Floats]],
        resumes: "Resumes | None" = None,
    ) -> None:
        """`rows`: nodes to predict for. `usable`: nodes whose host memory may be read. `waits`: service seconds of the
        request on every node -> (rest of the running batch, queue before it). `resumes`: decode nodes among `rows`."""
        self._prompt, self._names = prompt, roster.names
        self._index, self._usable = roster.index, usable
        self._rows = rows.nonzero()[0]
        plans = _prefixes(prompt, holders, roster, usable, fetch)
        service, rest = _service(prompt, roster, plans)
        duplicate = _duplicate(prompt, roster, plans)
        self.remaining_s, self.queue_s = waits(np.minimum(service[0], service[1]))
        wait = self.remaining_s + self.queue_s
        self.service_s, self._service_alone, self._rest_s = service[0], service[1], rest
        self._fetch_s, self._duplicate_s = plans.fetch_s, duplicate
        self.ttft_s = wait + service[0] + rest[0]
        self._alone = None
        if plans.fetches:
            whole = self.ttft_s + np.maximum(0.0, plans.fetch_s - wait) + duplicate
            alone = wait + service[1] + rest[1]
            self._alone = (plans.fetched > 0) & (alone + RECOMPUTE_GAIN_S < whole)
            self.ttft_s = np.where(self._alone, alone, whole)
        self._resumes = None if resumes is None else resumes.nodes
        self._cost_s = self.ttft_s if resumes is None else self.ttft_s + resumes.delay_s(self.service_s)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at: int) -> Candidate:  # type: ignore[override]  # never sliced
        return self._candidate(int(self._rows[at]))

    def __iter__(self) -> Iterator[Candidate]:
        return (self._candidate(int(row)) for row in self._rows)

    def best(self, turn: int) -> Candidate:
        """The smallest predicted TTFT, on a decode node with what it delays; `turn` rotates among equals. ValueError
        without nodes."""
        times = self._cost_s[self._rows]
        if not len(times):
            raise ValueError("no node to choose from")
        equal = (times <= times.min() + TIE_S).nonzero()[0]
        return self[int(equal[turn % len(equal)])]

    def first(self, count: int) -> list[Candidate]:
        """The best `count`, best first."""
        order = np.argsort(self._cost_s[self._rows], kind="stable")[:count]
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
        work = prompt.work(prefix.blocks, prefix.device)
        return Candidate(
            name,
            float(self.remaining_s[row]),
            float(self.queue_s[row]),
            float((self._service_alone if alone else self.service_s)[row]),
            0.0 if alone else float(self._fetch_s[row]),
            0.0 if alone else float(self._duplicate_s[row]),
            work,
            prefix.fetch,
            self._resumes is not None and bool(self._resumes[row]),
            float(self._rest_s[int(alone), row]),
        )

    def _readable(self, name: str) -> bool:
        row = self._index.get(name)
        return row is not None and bool(self._usable[row])


def _prefixes(prompt: Prompt, holders: Holders, roster: Roster, usable: Mask, fetch: FetchRow) -> _Prefixes:
    """What every node can reuse (`prefix.shared_prefix` for one): most nodes hold the same, so each kind of node walks
    the pieces once.

    Pieces do not overlap, so a node that a gap or a missing source has stopped is stopped for good: the next piece
    begins after its end.
    """
    match, limit, count, index = prompt.match, prompt.limit, len(roster), roster.index
    device, host, held = np.zeros(count), np.zeros(count), [0] * count
    device[holders.rows], host[holders.rows] = holders.l1_blocks, holders.l2_blocks
    if match.pending_node is not None and (row := index.get(match.pending_node)) is not None:
        device[row] = max(device[row], match.pending_blocks)
    device = np.minimum(device, limit)
    own = np.maximum(device, np.minimum(host, limit)).astype(int).tolist()
    walk: list[_Step] = []
    for place, piece in enumerate(sorted(match.pieces, key=_first) if match.pieces else ()):
        rows = [row for row in map(index.get, piece.nodes) if row is not None]
        mark = 1 << place
        for row in rows:
            held[row] |= mark
        peer = next((row for row in rows if usable[row]), None)
        walk.append((piece.first, min(piece.last, limit), mark, peer))
    numbers: dict[tuple[int, int], int] = {}
    kinds = np.array([numbers.setdefault(kind, len(numbers)) for kind in zip(own, held, strict=True)])
    size, costs = float(prompt.block_size), dict[int, tuple[Floats | float, Floats | float]]()
    rows_of: list[tuple[float, float, float, float]] = []
    uneven: list[tuple[int, int, int]] = []
    for number, (blocks, marks) in enumerate(numbers):
        end, alone, sources = _walk(blocks, marks, walk)
        tokens = seconds = 0.0
        for peer, run in sources:
            if peer not in costs:
                costs[peer] = fetch(roster.names[peer])
            rate, latency = costs[peer]
            tokens += run * size
            if isinstance(rate, float) and isinstance(latency, float):
                seconds += run * size / rate + latency
            else:
                uneven.append((number, peer, run))
        rows_of.append((end, alone, tokens, seconds))
    found = np.array(rows_of).T[:, kinds]
    for number, peer, run in uneven:
        rate, latency = costs[peer]
        found[3] += (kinds == number) * (run * size / rate + latency)
    return _Prefixes(found[:2], device, found[2], found[3], bool(costs))


def _walk(own: int, held: int, walk: list["_Step"]) -> tuple[int, int, tuple[tuple[int, int], ...]]:
    """(blocks with fetches, blocks without, runs fetched as (row of the source, blocks)) of a node that has `own`
    leading blocks and the pieces `held`."""
    end = alone = own
    sources: list[tuple[int, int]] = []
    going = True
    for first, last, mark, peer in walk:
        here = bool(held & mark)
        if here and first <= alone < last:
            alone = last
        if end >= last:
            continue
        if first > end or (peer is None and not here):
            break
        if not here and peer is not None:
            if going and sources and sources[-1][0] == peer:
                sources[-1] = (peer, sources[-1][1] + last - end)
            else:
                sources.append((peer, last - end))
        going, end = not here, last
    return end, alone, tuple(sources)


_Step = tuple[int, int, int, int | None]
"""A piece: first and last block, its bit, and the row of the node that would be read (None: nobody can be)."""


def _first(piece: Piece) -> int:
    return piece.first


def _service(prompt: Prompt, roster: Roster, plans: _Prefixes) -> tuple[Floats, Floats]:
    """T_req of both plans on every node, and the rest of their iterations; each (2, nodes)."""
    rows, size = roster.prefill, prompt.block_size
    cached = plans.blocks * size
    uncached = prompt.tokens - cached
    seconds: Floats = (rows.c1 + rows.c2 * (cached + (uncached + 1) / 2) + rows.c0_share) * uncached
    seconds += rows.c0_each
    seconds += rows.c3 * (cached - plans.device * size)
    if roster.knees:
        seconds += rows.c5 * np.maximum(0.0, uncached - rows.u0)
    if prompt.media_ends:
        seconds += rows.c4 * (len(prompt.media_ends) - np.searchsorted(prompt.media_ends, cached, "right"))
    return seconds, rows.c0_whole * np.maximum(0.0, 1.0 - uncached * rows.per_nu)


def _duplicate(prompt: Prompt, roster: Roster, plans: _Prefixes) -> Floats:
    """C_dup of the fetch on every node (`placement.duplicate_s` for one)."""
    rows, fetched = roster.prefill, plans.fetched
    if not plans.fetches or not np.count_nonzero(fetched > rows.free):
        return np.zeros(len(roster))
    share = np.minimum(1.0, rows.referenced / np.maximum(rows.used, 1.0))
    for name, known in prompt.match.referenced_share.items():
        row = roster.index.get(name)
        if row is not None:
            share[row] = known
    pays = (fetched > 0) & (rows.used > 0) & (fetched > rows.total - rows.used * share)
    seconds: Floats = np.where(pays, np.maximum(0.0, fetched - rows.free) * share * (rows.c1 + rows.c0_share), 0.0)
    return seconds


def best_of(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """The best `count`, best first, of predictions however they are kept."""
    if isinstance(candidates, Sweep):
        return candidates.first(count)
    return sorted(candidates, key=lambda found: found.ttft_s)[:count]
