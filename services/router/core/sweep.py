"""Predicted time to first token on all nodes at once: the rules of `placement.predict`, over arrays.

Row 0 of the two-row arrays is the plan with fetches from peers, row 1 the node's own part alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from services.router.core.placement import (
    RECOMPUTE_GAIN_S,
    TIE_S,
    Candidate,
    FetchCost,
    Prompt,
)
from services.router.core.prefix import NOTHING, local_prefix, shared_prefix
from services.router.core.roster import Floats, Mask, Roster
from services.router.core.timing import Work

FetchRow = Callable[[str], tuple[Floats | float, Floats | float]]
"""Source node -> (tokens per second, latency in seconds) to every node of the roster."""


@dataclass(frozen=True, slots=True)
class _Prefixes:
    """Leading blocks each plan reuses, those on the device, tokens it fetches and how long that takes."""

    blocks: Floats
    device: Floats
    fetched: Floats
    fetch_s: Floats


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
        self._usable = frozenset(name for name, use in zip(roster.names, usable.tolist(), strict=True) if use)
        self._rows = np.flatnonzero(rows)
        plans = _prefixes(prompt, roster, usable, fetch)
        service = _service(prompt, roster, plans)
        duplicate = _duplicate(prompt, roster, plans.fetched[0])
        own = service[1] if not plans.fetched[0].any() else np.minimum(service[0], service[1])
        self.remaining_s, self.queue_s = waits(own)
        wait = self.remaining_s + self.queue_s
        whole = wait + service[0] + np.maximum(0.0, plans.fetch_s[0] - wait) + duplicate
        alone = wait + service[1]
        self._alone = (plans.fetched[0] > 0) & (alone + RECOMPUTE_GAIN_S < whole)
        self.ttft_s = np.where(self._alone, alone, whole)
        self.service_s = np.where(self._alone, service[1], service[0])
        self._fetch_s = np.where(self._alone, 0.0, plans.fetch_s[0])
        self._duplicate_s = np.where(self._alone, 0.0, duplicate)

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

    def _candidate(self, row: int) -> Candidate:
        prompt, name = self._prompt, self._names[row]
        if prompt.match.blocks or prompt.match.nodes or prompt.match.pending_node:
            prefix = (
                local_prefix(name, prompt.match, prompt.limit)
                if self._alone[row]
                else shared_prefix(name, prompt.match, prompt.limit, self._usable.__contains__)
            )
        else:
            prefix = NOTHING
        cached = prefix.blocks * prompt.block_size
        return Candidate(
            name,
            float(self.remaining_s[row]),
            float(self.queue_s[row]),
            float(self.service_s[row]),
            float(self._fetch_s[row]),
            float(self._duplicate_s[row]),
            Work(prompt.tokens - cached, cached, (prefix.blocks - prefix.device) * prompt.block_size),
            prefix.fetch,
        )


def _prefixes(prompt: Prompt, roster: Roster, usable: Mask, fetch: FetchRow) -> _Prefixes:
    """What every node can reuse, walking the pieces once for all of them (`prefix.shared_prefix` for one)."""
    match, limit, count = prompt.match, prompt.limit, len(roster)
    device, host = np.zeros(count), np.zeros(count)
    for node in match.nodes:
        row = roster.index.get(node.node)
        if row is not None:
            device[row], host[row] = node.l1_blocks, node.l2_blocks
    if match.pending_node is not None and (row := roster.index.get(match.pending_node)) is not None:
        device[row] = max(device[row], match.pending_blocks)
    device = np.minimum(device, limit)
    own = np.maximum(device, np.minimum(host, limit))
    end, going = np.stack([own, own]), np.ones((2, count), bool)
    fetched, fetch_s, source = np.zeros((2, count)), np.zeros(count), np.full(count, -1)
    for piece in sorted(match.pieces, key=lambda piece: piece.first):
        last = min(piece.last, limit)
        here = np.zeros(count, bool)
        rows = [row for row in map(roster.index.get, piece.nodes) if row is not None]
        here[rows] = True
        peer = next((row for row in rows if usable[row]), None)
        active = going & (last > end)
        stuck = active & (piece.first > end)
        stuck[1] |= active[1] & ~here
        if peer is None:
            stuck[0] |= active[0] & ~here
        going &= ~stuck
        active &= ~stuck
        moved = active[0] & ~here
        if peer is not None and moved.any():
            tokens = np.where(moved, last - end[0], 0.0) * prompt.block_size
            rate, latency = fetch(roster.names[peer])
            fetched[0] += tokens
            fetch_s += np.where(moved, tokens / rate + np.where(source == peer, 0.0, latency), 0.0)
            source = np.where(moved, peer, source)
        source = np.where(active[0] & here, -1, source)
        end = np.where(active, last, end)
    return _Prefixes(end, device, fetched, fetch_s[None])


def _service(prompt: Prompt, roster: Roster, plans: _Prefixes) -> Floats:
    """T_req of both plans on every node."""
    rows, size = roster.prefill, prompt.block_size
    cached = plans.blocks * size
    uncached = prompt.tokens - cached
    iterations = np.where(np.isnan(rows.nu), 1.0, uncached / rows.nu)
    pairs = uncached * cached + uncached * (uncached + 1) / 2
    restored = (plans.blocks - plans.device) * size
    seconds: Floats = rows.c0 * iterations + rows.c1 * uncached + rows.c2 * pairs + rows.c3 * restored
    if rows.c5.any():
        seconds += rows.c5 * np.maximum(0.0, uncached - rows.u0)
    return seconds


def _duplicate(prompt: Prompt, roster: Roster, fetched: Floats) -> Floats:
    """C_dup of the fetch on every node (`placement.duplicate_s` for one)."""
    rows = roster.prefill
    if not fetched.any():
        return fetched
    used = np.maximum(rows.used, 1.0)
    share = np.minimum(1.0, rows.referenced / used)
    for name, known in prompt.match.referenced_share.items():
        row = roster.index.get(name)
        if row is not None:
            share[row] = known
    free = np.maximum(0.0, rows.total - rows.used)
    token_s = rows.c1 + np.where(np.isnan(rows.nu), 0.0, rows.c0 / rows.nu)
    pays = (fetched > 0) & (rows.used > 0) & (fetched > rows.total - rows.used * share)
    seconds: Floats = np.where(pays, np.maximum(0.0, fetched - free) * share * token_s, 0.0)
    return seconds


def uniform(cost: FetchCost) -> FetchRow:
    """The same rate and latency between all nodes."""
    return lambda _: (cost.tokens_per_s, cost.latency_s)
