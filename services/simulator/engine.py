"""The engine of a node in virtual time: one loop, in which both phases get equal time while both have work.

Batches are the core's (`compose_prefill`), times those of its iteration models. Decode iterations between two changes
of the batch are one event: with B requests the context grows by B*t_acc an iteration, so their times are an arithmetic
series. Requests join and leave at iteration boundaries; each is given t_acc tokens an iteration.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from services.engine.core.answers import by_length
from services.engine.core.batching import PrefillBatch, PrefillWork, compose_prefill, finish_prefill
from services.engine.core.timing import DecodeTerms, IterationTime, PrefillTerms
from services.engine.core.turns import Turns
from services.simulator.call import Call
from services.simulator.clock import Agenda

_EPS = 1e-9


@dataclass(slots=True, eq=False)
class Prefilling:
    """A call whose prefix is on the device, or will be loaded when its first batch starts.

    `last_tokens`: how many of its tokens the newest batch computes.
    """

    call: Call
    work: PrefillWork
    started: bool = False
    last_tokens: int = 0


class EngineOwner(Protocol):
    """Whom the engine tells."""

    def prefill_begins(self, item: Prefilling, now: float) -> float:
        """The first batch with this call starts; seconds that the device waits for its prefix. May change its work."""
        ...

    def prefill_done(self, item: Prefilling, now: float) -> None: ...

    def decode_done(self, call: Call, now: float) -> None: ...

    def prefill_iterated(self, terms: PrefillTerms, cached_tokens: int, duration_s: float, now: float) -> None: ...

    def decode_iterated(
        self, iterations: int, requests: int, context_tokens: float, duration_s: float, now: float
    ) -> None:
        """`iterations` in a row with the same `requests`, over a context of `context_tokens` on average."""
        ...


class Engine:
    """`accepted`: tokens an iteration gives each running request (t_acc)."""

    def __init__(
        self,
        agenda: Agenda,
        owner: EngineOwner,
        times: IterationTime,
        accepted: float,
        batch_tokens: int,
        max_running: int,
    ) -> None:
        self.times = times
        self._agenda, self._owner = agenda, owner
        self._accepted, self._batch_tokens, self._max_running = max(1.0, accepted), batch_tokens, max_running
        self._ready: list[Prefilling] = []
        self._batch: PrefillBatch | None = None
        self._joining: deque[tuple[Call, int]] = deque()
        self._running: list[tuple[int, int, Call, float]] = []
        self._leaving: list[tuple[Call, Callable[[int, float], None]]] = []
        self._iteration, self._joined = 0, 0
        self._context = 0.0
        self._turns = Turns()
        self._turn = 0
        self._start = self._first_s = self._slope_s = self._duration = 0.0
        self._planned = 0

    @property
    def decoding(self) -> int:
        """Requests in decode, those that join at the next boundary included."""
        return len(self._running) + len(self._joining)

    def decoding_by_length(self, now: float) -> list[int]:
        """Requests in decode that have given 2**k to 2**(k+1) - 1 tokens, by k; the first came from prefill."""
        iteration = self._iteration + (min(self._planned, self._begun(now - self._start)) if self._planned else 0)
        given = (1 + base + self._accepted * iteration - call.prompt_tokens for _, _, call, base in self._running)
        return by_length([*map(int, given), *(1 for _ in self._joining)])

    @property
    def prefilling(self) -> int:
        """Requests in prefill or ready for it."""
        return len(self._ready)

    @property
    def idle(self) -> bool:
        return self._batch is None and not self._planned

    def prefill(self, item: Prefilling, now: float) -> None:
        """A call may go into the next batch."""
        self._ready.append(item)
        self._disturb(now, self._turns.owed_s)

    def decode(self, call: Call, now: float) -> None:
        """A call's KV is here: it decodes all but its first token."""
        self._joining.append((call, math.ceil((call.output_tokens - 1) / self._accepted)))
        self._disturb(now)

    def leave(self, call: Call, then: Callable[[int, float], None], now: float) -> None:
        """Take a call out at the end of the iteration under way; `then` gets the iterations it still needs.

        Not called when it is answered first.
        """
        for entry in self._joining:
            if entry[0] is call:
                self._joining.remove(entry)
                then(entry[1], now)
                return
        self._leaving.append((call, then))
        self._disturb(now)

    def resume(self, call: Call, iterations: int, now: float) -> None:
        """A call that was taken out of another engine goes on here."""
        self._joining.append((call, iterations))
        self._disturb(now)

    # turns

    def _disturb(self, now: float, least_s: float = 0.0) -> None:
        """Something came: begin, or end a row of decode iterations with the one under way, but not before `least_s`."""
        if self.idle:
            self._next(now)
        elif self._planned > 1:
            under_way = self._begun(max(now - self._start, least_s))
            if under_way < self._planned:
                self._planned = under_way
                self._plan_decode()

    def _next(self, now: float) -> None:
        self._admit()
        if self._ready and self._turns.prefill_due(decoding=bool(self._running)):
            self._begin_prefill(now)
        elif self._running:
            self._begin_decode(now)

    def _admit(self) -> None:
        while self._joining and len(self._running) < self._max_running:
            call, iterations = self._joining.popleft()
            self._joined += 1
            base = call.prompt_tokens - self._accepted * self._iteration
            heapq.heappush(self._running, (self._iteration + iterations, self._joined, call, base))
            self._context += call.prompt_tokens

    def _begin_prefill(self, now: float) -> None:
        wait_s = 0.0
        room = self._batch_tokens
        for item in self._ready:
            if room <= 0:
                break
            if not item.started:
                item.started = True
                wait_s = max(wait_s, self._owner.prefill_begins(item, now))
            room -= item.work.left
        batch = compose_prefill((item.work for item in self._ready), self._batch_tokens)
        assert batch is not None
        for item, chunk in zip(self._ready, batch.chunks, strict=False):
            item.last_tokens = chunk.tokens
        terms = batch.terms
        duration = self.times.prefill_s(terms)
        self._batch = batch

        def end(at: float) -> None:
            self._turns.prefilled(duration)
            self._owner.prefill_iterated(terms, batch.cached_tokens, duration, at)
            self._end_prefill(at)

        self._agenda.at(now + wait_s + duration, end)

    def _end_prefill(self, now: float) -> None:
        assert self._batch is not None
        finish_prefill(self._batch)
        self._batch = None
        done = [item for item in self._ready if item.work.left == 0]
        self._ready = [item for item in self._ready if item.work.left]
        for item in done:
            self._owner.prefill_done(item, now)
        if self.idle:
            self._next(now)

    def _begin_decode(self, now: float) -> None:
        running = len(self._running)
        growth = running * self._accepted
        self._first_s = self.times.decode_s(DecodeTerms(running, int(self._context)))
        self._slope_s = self.times.decode_s(DecodeTerms(running, int(self._context + growth))) - self._first_s
        self._start = now
        left = max(1, self._running[0][0] - self._iteration)
        self._planned = min(left, self._begun(self._turns.owed_s)) if self._ready else left
        self._plan_decode()

    def _plan_decode(self) -> None:
        self._turn += 1
        turn = self._turn

        def end(now: float) -> None:
            if turn == self._turn:
                self._end_decode(now)

        self._agenda.at(self._start + self._series(self._planned), end)

    def _end_decode(self, now: float) -> None:
        iterations, running = self._planned, len(self._running)
        self._planned = 0
        self._turns.decoded(now - self._start)
        growth = running * self._accepted
        mean = self._context + growth * (iterations - 1) / 2
        self._owner.decode_iterated(iterations, running, mean, now - self._start, now)
        self._iteration += iterations
        self._context += growth * iterations
        done: list[Call] = []
        while self._running and self._running[0][0] <= self._iteration:
            _, _, call, base = heapq.heappop(self._running)
            self._context -= base + self._accepted * self._iteration
            done.append(call)
        leaving, self._leaving = self._leaving, []
        for call, then in leaving:
            self._take_out(call, then, now)
        for call in done:
            self._owner.decode_done(call, now)
        if self.idle:
            self._next(now)

    def _series(self, iterations: int) -> float:
        """Seconds that the first `iterations` of the row take."""
        return iterations * self._first_s + self._slope_s * iterations * (iterations - 1) / 2

    def _begun(self, elapsed_s: float) -> int:
        """How many iterations of the row have begun after so many seconds; one at least."""
        elapsed_s -= _EPS
        if elapsed_s <= 0:
            return 1
        half, slope = self._first_s - self._slope_s / 2, self._slope_s
        exact = elapsed_s / half if slope <= 0 else (math.sqrt(half * half + 2 * slope * elapsed_s) - half) / slope
        begun = max(1, math.ceil(exact))
        while begun > 1 and self._series(begun - 1) >= elapsed_s:
            begun -= 1
        while self._series(begun) < elapsed_s:
            begun += 1
        return begun

    def _take_out(self, call: Call, then: Callable[[int, float], None], now: float) -> None:
        for number, (until, _, running, base) in enumerate(self._running):
            if running is call:
                self._running.pop(number)
                heapq.heapify(self._running)
                self._context -= base + self._accepted * self._iteration
                then(until - self._iteration, now)
                return

    def check(self) -> None:
        """Contexts add up; nobody runs beyond his end."""
        exact = sum(base + self._accepted * self._iteration for _, _, _, base in self._running)
        assert abs(exact - self._context) < 1.0 + 1e-6 * exact, (exact, self._context)
        assert all(until >= self._iteration for until, _, _, _ in self._running)
        assert all(item.work.left >= 0 for item in self._ready)
