"""Telemetry windows: slices of time with the mean work of a request and the mean number of requests in decode.

A slice says `unknown` where a source that should have reported was silent, `idle` where everyone reported and nothing
ran, `switching` where it overlaps a change of the split, `warm-up` where nodes were kept at both phases for it, else
`known`. Unknown is never taken for zero.
"""

import math
from collections import deque
from dataclasses import dataclass
from enum import StrEnum

import msgspec
import numpy as np

from schemas.phase import Phase, Workload
from schemas.telemetry import LENGTH_CLASSES, IterationBatch, RequestTelemetry
from services.planner.core.demand import Demand, Pauses
from services.planner.core.starts import Vector


class SliceKind(StrEnum):
    KNOWN = "known"
    IDLE = "idle"
    UNKNOWN = "unknown"
    SWITCHING = "switching"
    WARM_UP = "warm-up"


@dataclass(frozen=True, slots=True)
class WindowSettings:
    """Durations in seconds; a source silent for longer than `max_gap_s` makes its slice unknown."""

    slice_s: float = 60.0
    slices: int = 10
    max_gap_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Slice:
    """A closed slice, in which `requests` ended. `workload` is the mean request, `q` the mean number of those in
    decode, `in_flight` of those anywhere in the cluster; `demand` has the sums behind the workload. None: not
    known."""

    start: float
    kind: SliceKind
    requests: int
    workload: Workload | None
    q: float | None
    in_flight: float | None = None
    demand: Demand | None = None

    def agents(self, slice_s: float) -> float:
        """Branches under way: those with a request in flight and, by Little's law, those that pause (X*Z).

        A request that still waits counts: while a queue grows, those that have ended say too little.
        """
        assert self.demand is not None
        assert self.in_flight is not None
        return self.in_flight + self.demand.think_s * self.demand.requests / slice_s


@dataclass(slots=True)
class _Source:
    """One reporter: when it was last heard, and within the open slice its longest silence and its gauges."""

    heard_at: float
    counted_to: float
    decoding: int = 0
    in_flight: int = 0
    by_length: tuple[int, ...] = ()
    engine: int = 0
    silence_s: float = 0.0
    decode_area: float = 0.0
    flight_area: float = 0.0

    @property
    def tells_lengths(self) -> bool:
        """Whether it says how long the answers are that run there."""
        return bool(self.by_length) or not self.decoding

    def count_to(self, now: float) -> None:
        self.decode_area += self.decoding * max(0.0, now - self.counted_to)
        self.flight_area += self.in_flight * max(0.0, now - self.counted_to)
        self.silence_s = max(self.silence_s, now - self.heard_at)
        self.counted_to = max(now, self.counted_to)


class Windows:
    """Slices follow one another from `start` on (monotonic seconds), windows of `settings.slices` of them likewise.

    `by_start`: the work of a slice is that of the requests which began in it, else of those which ended.
    Call `advance` before feeding records, so that a record falls into the slice of its receipt. `rejected` counts
    records with a value that is not a finite number: that record alone is left out.
    """

    def __init__(self, settings: WindowSettings, start: float, *, by_start: bool = True) -> None:
        self.settings, self._by_start = settings, by_start
        self.start = start
        self.rejected = 0
        self._nodes: dict[str, _Source] = {}
        self._routers: dict[str, _Source] = {}
        self._sums = Demand()
        self._ran: tuple[dict[str, int], Vector] | None = None
        self._pauses = Pauses()
        self._gone = False
        self._switch_active = False
        self._switch_overlap = False
        self._warm_up_active = False
        self._warm_up_overlap = False
        self._window: list[Slice] = []
        self._recent: deque[tuple[Slice, Demand]] = deque(maxlen=settings.slices)

    def node_beat(
        self, node: str, decoding: int, in_flight: int, now: float, by_length: tuple[int, ...] = (), engine: int = 0
    ) -> None:
        """A heartbeat of a node: its running decode requests, and all that are there, each counted on one node;
        `by_length`: the former by the class of their answers so far; `engine` is another one after a restart."""
        self._beat(self._nodes, node, decoding, in_flight, now)
        self._nodes[node].by_length, self._nodes[node].engine = by_length, engine

    def router_beat(self, router: str, now: float) -> None:
        """A heartbeat of a router: requests that end there would be reported."""
        self._beat(self._routers, router, 0, 0, now)

    def forget(self, name: str) -> None:
        """A node or router that left; the slice in which it was missed is unknown."""
        for sources in (self._nodes, self._routers):
            if sources.pop(name, None) is not None:
                self._gone = True

    def request(self, record: RequestTelemetry) -> None:
        """A finished request; one that was not served is no work."""
        if not all(map(math.isfinite, (record.t_arrive, record.t_end, record.t))):
            self.rejected += 1
        elif record.output_tokens > 0:
            self._sums.add(record, self._pauses.pause_s(record))

    def iterations(self, batch: IterationBatch) -> None:
        """Those of decode give the accepted tokens per request and iteration, those of prefill what was computed."""
        for iteration in batch.iterations:
            if not (math.isfinite(iteration.duration_s) and math.isfinite(iteration.attention_pairs)):
                self.rejected += 1
            elif iteration.phase is Phase.DECODE:
                self._sums.decode_steps += iteration.requests
                self._sums.accepted += iteration.accepted_tokens
            else:
                self._sums.starts.iterated(iteration.uncached_tokens, iteration.attention_pairs, iteration.media)

    def switching(self, *, active: bool) -> None:
        """From now on the split is (not) changing; a slice that overlaps a change is left out."""
        self._switch_active = active
        self._switch_overlap = self._switch_overlap or active

    def warming(self, *, active: bool) -> None:
        """From now on nodes are (not) kept at both phases for warm-up; a slice that overlaps it is left out."""
        self._warm_up_active = active
        self._warm_up_overlap = self._warm_up_overlap or active

    def advance(self, now: float) -> list[list[Slice]]:
        """Close every slice that has ended by `now`; returns the windows completed by that, oldest first."""
        windows: list[list[Slice]] = []
        while now - self.start >= self.settings.slice_s:
            self._window.append(self._close(self.start + self.settings.slice_s))
            if len(self._window) == self.settings.slices:
                windows.append(self._window)
                self._window = []
        return windows

    def latest(self, count: int) -> list[Slice]:
        """The last `count` closed slices, oldest first; fewer while there are no more, at most a window of them."""
        return [closed for closed, _ in list(self._recent)[-count:]] if count else []

    def recent(self, now: float) -> tuple[Workload | None, float | None]:
        """Mean work per request and mean number in decode over the last usable slices and the open one."""
        sums, area, seconds = self._sums, 0.0, 0.0
        if self._nodes:
            area, seconds = self._area(now), now - self.start
        for closed, part in self._recent:
            if closed.q is not None:
                sums = sums.plus(part)
                area += closed.q * self.settings.slice_s
                seconds += self.settings.slice_s
        return sums.workload(), area / seconds if seconds > 0 else None

    def _beat(self, sources: dict[str, _Source], name: str, decoding: int, in_flight: int, now: float) -> None:
        source = sources.setdefault(name, _Source(heard_at=now, counted_to=now))
        source.count_to(now)
        source.heard_at = now
        source.decoding, source.in_flight = decoding, in_flight

    def _area(self, now: float) -> float:
        for source in self._nodes.values():
            source.count_to(now)
        return sum(source.decode_area for source in self._nodes.values())

    def _close(self, end: float) -> Slice:
        area = self._area(end)
        self._begun()
        flights = sum(source.flight_area for source in self._nodes.values())
        for router in self._routers.values():
            router.count_to(end)
        kind = self._kind()
        usable = kind in (SliceKind.KNOWN, SliceKind.IDLE)
        workload = self._sums.workload() if kind is SliceKind.KNOWN else None
        q = area / self.settings.slice_s if usable else None
        closed = Slice(
            start=self.start,
            kind=kind,
            requests=self._sums.requests,
            workload=workload,
            q=q,
            in_flight=flights / self.settings.slice_s if usable else None,
            demand=self._sums if usable else None,
        )
        self._recent.append((closed, self._sums))
        self.start, self._sums, self._gone = end, Demand(), False
        self._switch_overlap, self._warm_up_overlap = self._switch_active, self._warm_up_active
        for source in (*self._nodes.values(), *self._routers.values()):
            source.decode_area = source.flight_area = source.silence_s = 0.0
        return closed

    def _begun(self) -> None:
        """Tell what began in the slice that ends now, if the same engines told at both ends what ran there."""
        engines = {name: source.engine for name, source in self._nodes.items()}
        running = np.zeros(LENGTH_CLASSES)
        for source in self._nodes.values():
            running[: len(source.by_length)] += source.by_length
        before = self._ran
        self._ran = (engines, running) if all(source.tells_lengths for source in self._nodes.values()) else None
        if self._by_start and before is not None and self._ran is not None and before[0] == engines:
            self._sums.starts.ran(before[1], running)

    def _kind(self) -> SliceKind:
        if self._switch_overlap:
            return SliceKind.SWITCHING
        if self._warm_up_overlap:
            return SliceKind.WARM_UP
        sources = (*self._nodes.values(), *self._routers.values())
        silent = any(source.silence_s > self.settings.max_gap_s for source in sources)
        if self._gone or silent or not self._nodes or not self._routers:
            return SliceKind.UNKNOWN
        return SliceKind.KNOWN if self._sums.requests else SliceKind.IDLE

    def check(self) -> None:
        """No negative sum, no workload or gauge that is not finite, never a full window left unreported."""
        assert len(self._window) < self.settings.slices
        self._sums.check()
        for closed, _ in self._recent:
            assert closed.q is None or (math.isfinite(closed.q) and closed.q >= 0)
            assert (closed.workload is not None) == (closed.kind is SliceKind.KNOWN)
            if closed.workload is not None:
                assert all(map(math.isfinite, msgspec.structs.astuple(closed.workload)))
