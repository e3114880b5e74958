"""The turns of the timed engine: a prefill half, if it is due, and a decode half, each an iteration if it has work."""

import asyncio
import itertools
from collections.abc import Iterable
from typing import Protocol

from schemas.phase import Phase
from schemas.serve import Finish, RequestState
from schemas.telemetry import Iteration
from services.clock import Clock
from services.engine.backend import BackendEvents, LegKey
from services.engine.core.batching import accept_tokens, compose_decode, compose_prefill, finish_prefill
from services.engine.core.timing import Preset
from services.engine.core.turns import Turns
from services.engine.timed.pace import Pace
from services.engine.timed.sampler import Sampler
from services.engine.timed.settings import TimedSettings
from services.engine.timed.state import TimedLeg


class Engine(Protocol):
    """What the loop needs of the engine around it."""

    legs: dict[LegKey, TimedLeg]

    @property
    def events(self) -> BackendEvents: ...

    def enter(self, timed: TimedLeg, state: RequestState) -> None: ...

    def keep(self, timed: TimedLeg, blocks: int) -> None: ...

    def move(self, timed: TimedLeg) -> None: ...

    def end(self, timed: TimedLeg, finish: Finish, reason: str) -> None: ...

    def settle(self, batch: Iterable[TimedLeg]) -> None: ...


class TimedLoop:
    """Runs for ever; sleeps while no leg has work."""

    def __init__(
        self, engine: Engine, settings: TimedSettings, preset: Preset, sampler: Sampler, clock: Clock, pace: Pace
    ) -> None:
        self._engine, self._settings, self._preset = engine, settings, preset
        self._sampler, self._clock, self._pace = sampler, clock, pace
        self._numbers, self._turns = itertools.count(1), Turns()
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """A leg has work now."""
        self._wake.set()

    async def run(self) -> None:
        while True:
            self._wake.clear()
            decoding = any(timed.decode is not None for timed in self._engine.legs.values())
            ran = self._turns.prefill_due(decoding=decoding) and await self._prefill_half()
            ran |= await self._decode_half()
            if not ran:
                await self._wake.wait()

    async def _prefill_half(self) -> bool:
        """One iteration over waiting prompts, in the order in which they came in."""
        ready = {id(t.prefill): t for t in self._engine.legs.values() if t.prefill is not None}
        batch = compose_prefill((t.prefill for t in ready.values() if t.prefill), self._settings.batch_tokens)
        if batch is None:
            return False
        legs = [ready[id(chunk.work)] for chunk in batch.chunks]
        for timed in legs:
            timed.batched = True
            self._engine.enter(timed, RequestState.PREFILLING)
        duration_s = await self._pace.spend(
            self._preset.times.prefill_s(batch.terms) + self._settings.media_s * batch.terms.media
        )
        self._turns.prefilled(duration_s)
        done = {id(work) for work in finish_prefill(batch)}
        for timed, chunk in zip(legs, batch.chunks, strict=True):
            if timed.ending is None:
                blocks = min(chunk.work.done // self._settings.block_size, len(timed.leg.digests))
                self._engine.keep(timed, blocks)
                if id(chunk.work) in done:
                    self._first_token(timed)
        self._engine.settle(legs)
        terms = batch.terms
        self._engine.events.iteration(
            Iteration(
                t=self._clock.wall(),
                seq=next(self._numbers),
                phase=Phase.PREFILL,
                duration_s=duration_s,
                requests=terms.requests,
                uncached_tokens=terms.uncached_tokens,
                attention_pairs=terms.attention_pairs,
                restored_tokens=terms.restored_tokens,
                cached_tokens=batch.cached_tokens,
                media=terms.media,
                output_tokens=len(done),
            )
        )
        return True

    def _first_token(self, timed: TimedLeg) -> None:
        """The prompt is computed: its first token goes out, its KV to the decode node."""
        timed.prefill = None
        token, finish = self._sampler.draw(timed)
        self._engine.events.tokens(timed.key, 0, [token])
        if finish is None:
            self._engine.move(timed)
        else:
            self._engine.end(timed, finish, "")

    async def _decode_half(self) -> bool:
        """One iteration over the running requests, the oldest first."""
        running = {id(t.decode): t for t in self._engine.legs.values() if t.decode is not None}
        batch = compose_decode((t.decode for t in running.values() if t.decode), self._settings.max_running)
        if batch is None:
            return False
        legs = [running[id(work)] for work in batch.works]
        for timed in legs:
            timed.batched = True
            self._engine.enter(timed, RequestState.DECODING)
        duration_s = await self._pace.spend(self._preset.times.decode_s(batch.terms))
        self._turns.decoded(duration_s)
        accepted = sum(self._answer(timed) for timed in legs)
        self._engine.settle(legs)
        fed = round(self._preset.times.fed_tokens * len(legs))
        self._engine.events.iteration(
            Iteration(
                t=self._clock.wall(),
                seq=next(self._numbers),
                phase=Phase.DECODE,
                duration_s=duration_s,
                requests=batch.terms.requests,
                context_tokens=batch.terms.context_tokens,
                output_tokens=accepted,
                accepted_tokens=accepted,
                fed_tokens=fed,
            )
        )
        return True

    def _answer(self, timed: TimedLeg) -> int:
        """Give one request what this iteration accepted for it; returns how many tokens."""
        work = timed.decode
        if work is None:
            return 0
        first = timed.delivered
        tokens: list[int] = []
        finish: Finish | None = None
        for _ in range(accept_tokens(work, self._preset.accepted_tokens)):
            token, finish = self._sampler.draw(timed)
            tokens.append(token)
            if finish is not None:
                break
        self._engine.events.tokens(timed.key, first, tokens)
        self._engine.keep(timed, timed.context.blocks_with_kv())
        if finish is not None:
            self._engine.end(timed, finish, "")
        return len(tokens)
