"""The engine service's `Backend` on SGLang: legs in, events out. Imports neither torch nor sglang."""

import asyncio
import itertools
import logging
from dataclasses import dataclass
from pathlib import Path

from schemas.block_key import PLAIN, token_list
from schemas.phase import Phase
from schemas.serve import Finish, RequestState
from services.engine.backend import BackendEvents, BackendInfo, Leg, LegKey
from services.engine.sglang.config import PluginConfig, SglangSettings
from services.engine.sglang.experts import experts_of
from services.engine.sglang.frames import (
    Cancel,
    DropDecodeCache,
    End,
    Frame,
    Notice,
    Refused,
    State,
    Step,
    Submit,
    Tokens,
)
from services.engine.sglang.process import EngineProcess

_REFUSED_S = 1.0
"""The scheduler and the front end report over two connections: how much later the one's word may come."""
_log = logging.getLogger(__name__)


@dataclass
class _Inside:
    """One leg in the engine. `reserved`: KV tokens it may come to hold."""

    leg: Leg
    rid: str
    reserved: int
    first_token: int | None = None
    cached: int = 0
    restored: int = 0
    cancelled: bool = False
    entered: bool = False
    stopped: bool = False


class SglangBackend:
    """One SGLang engine, symmetric by our plug-in. `pool_socket` is that of the node's KV pool, None without one."""

    info: BackendInfo

    def __init__(
        self, settings: SglangSettings, *, pool_socket: Path | None = None, folder: Path | None = None
    ) -> None:
        self._settings = settings
        plugin = PluginConfig(
            plain=False,
            device=settings.device,
            channel="",
            pool=str(pool_socket or ""),
            model=settings.model,
            key_version=PLAIN,
            idle_poll_s=settings.idle_poll_s,
        )
        self._process = EngineProcess(settings, plugin, self._frame, self._failed, folder=folder)
        self._legs: dict[LegKey, _Inside] = {}
        self._by_rid: dict[str, _Inside] = {}
        self._numbers = itertools.count(1)
        self._used_tokens = 0
        self._events: BackendEvents
        self._eos: frozenset[int]

    async def start(self, events: BackendEvents) -> None:
        """Start SGLang and wait for it. EngineFailed with the end of its log otherwise."""
        self._events = events
        await self._process.start()
        capacity, ready = self._process.capacity.result(), self._process.ready.result()
        self._eos = frozenset(ready.eos_token_ids)
        settings = self._settings
        experts_per_token, experts = experts_of(Path(self._process.model_path))
        self.info = BackendInfo(
            engine="sglang",
            model=settings.model,
            dtype=settings.dtype,
            block_size=settings.block_size,
            block_bytes=capacity.block_bytes,
            key_version=PLAIN,
            ranks=capacity.ranks,
            l1_tokens=capacity.l1_tokens,
            max_context_tokens=min(settings.context_tokens, ready.max_context_tokens),
            max_running=capacity.max_running,
            batch_tokens=settings.chunk_tokens,
            rendezvous=self._process.rendezvous,
            tokenizer=str(self._process.model_path),
            experts_per_token=experts_per_token,
            experts=experts,
        )

    @property
    def pid(self) -> int | None:
        """The process id of SGLang's main process."""
        return self._process.pid

    def submit(self, leg: Leg) -> None:
        """Hand a leg to SGLang."""
        rid = f"{next(self._numbers):08x}.{leg.key.id}.{leg.key.attempt}.{leg.key.phase}"
        inside = _Inside(leg=leg, rid=rid, reserved=self._need(leg))
        self._legs[leg.key] = self._by_rid[rid] = inside
        self._process.send(
            "worker",
            Submit(
                rid=rid,
                tokens=leg.tokens,
                sampling=leg.sampling,
                phase=leg.key.phase,
                room=leg.room,
                rendezvous=leg.rendezvous,
                session=leg.session,
                cache_salt=leg.cache_salt,
                extra_key=leg.extra_key,
                media=list(leg.media),
                data=list(leg.data),
            ),
        )

    def _need(self, leg: Leg) -> int:
        """Whole pages for the prompt (and the answer, in a decode leg), and one page to spare."""
        tokens = leg.prompt_tokens + (leg.sampling.max_new_tokens if leg.key.phase is Phase.DECODE else 1)
        block = self._settings.block_size
        return (-(-tokens // block) + 1) * block

    def cancel(self, key: LegKey) -> None:
        """Stop a leg; its end follows."""
        inside = self._legs.get(key)
        if inside is not None and not inside.cancelled:
            inside.cancelled = True
            self._process.send("worker", Cancel(rid=inside.rid))

    def prefilled(self, key: LegKey, token: int) -> None:
        """SGLang's own transfer starts the decode."""

    def room(self, phase: Phase) -> int:
        """KV tokens a new leg may take; cached tokens give way, so only legs inside count."""
        legs = [inside for inside in self._legs.values() if inside.leg.key.phase is phase]
        if len(legs) >= self.info.max_running:
            return 0
        free = self.info.l1_tokens - sum(inside.reserved for inside in self._legs.values())
        return max(0, free - self._settings.block_size)

    def used_tokens(self) -> int:
        """KV tokens in device memory when the scheduler last said so."""
        return self._used_tokens

    def drop_decode_cache(self) -> None:
        """Free device blocks that only decode used, over the next turns of the scheduler."""
        self._process.send("worker", DropDecodeCache())

    async def stop(self) -> None:
        """End SGLang and everything it started."""
        await self._process.stop()

    def _failed(self, reason: str) -> None:
        self._legs.clear()
        self._by_rid.clear()
        self._events.failed(reason)

    def _frame(self, frame: Frame) -> None:
        if isinstance(frame, Step):
            self._step(frame)
        elif isinstance(frame, Refused):
            self._refused(frame)
        elif isinstance(frame, Notice):
            _log.warning(frame.text)

    def _step(self, step: Step) -> None:
        self._used_tokens = step.used_tokens
        for rid in step.entered:
            if rid in self._by_rid:
                self._by_rid[rid].entered = True
        for state in step.states:
            self._state(state)
        for tokens in step.tokens:
            self._tokens(tokens)
        for end in step.ends:
            self._end(end)
        for iteration in step.iterations:
            self._events.iteration(iteration)
        if step.changes:
            self._events.device_changes(step.changes)

    def _state(self, state: State) -> None:
        inside = self._by_rid.get(state.rid)
        if inside is not None:
            if state.state is RequestState.PREFILLING:
                inside.cached, inside.restored = state.cached_tokens, state.restored_tokens
            self._events.state(inside.leg.key, state.state)

    def _tokens(self, news: Tokens) -> None:
        inside = self._by_rid.get(news.rid)
        if inside is None or inside.stopped:
            return
        tokens = self._until_stop(inside, news.first, token_list(news.tokens))
        if inside.first_token is None:
            inside.first_token = tokens[0]
            if inside.leg.key.phase is Phase.DECODE:
                self._events.state(inside.leg.key, RequestState.DECODING)
        self._events.tokens(inside.leg.key, news.first, tokens)

    def _until_stop(self, inside: _Inside, first: int, tokens: list[int]) -> list[int]:
        """SGLang ignores stop tokens too when it ignores end-of-sequence: cut the answer here then."""
        sampling = inside.leg.sampling
        if not sampling.ignore_eos or not sampling.stop_token_ids:
            return tokens
        for index, token in enumerate(tokens):
            if token in sampling.stop_token_ids and first + index + 1 >= sampling.min_new_tokens:
                inside.stopped = True
                if inside.leg.key.phase is Phase.DECODE:
                    self._process.send("worker", Cancel(rid=inside.rid))
                return tokens[: index + 1]
        return tokens

    def _end(self, end: End) -> None:
        inside = self._by_rid.pop(end.rid, None)
        if inside is None:
            return
        key = inside.leg.key
        del self._legs[key]
        finish, reason = end.finish, end.reason
        if finish is Finish.ERROR and inside.cancelled:
            finish, reason = Finish.CANCELLED, ""
        elif inside.stopped and key.phase is Phase.DECODE:
            finish, reason = Finish.STOP, ""
        elif finish is not Finish.ERROR and key.phase is Phase.PREFILL:
            finish = self._prefill_finish(inside)
        cached = inside.cached if key.phase is Phase.PREFILL else end.cached_tokens
        self._events.ended(key, finish, reason, cached, inside.restored)

    def _prefill_finish(self, inside: _Inside) -> Finish:
        """SGLang hands every prefill over; whether the first token was the last one is seen here."""
        sampling, token = inside.leg.sampling, inside.first_token
        stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else self._eos)
        if token in stops and sampling.min_new_tokens <= 1:
            return Finish.STOP
        return Finish.LENGTH if sampling.max_new_tokens == 1 else Finish.HANDED_OFF

    def _refused(self, refused: Refused) -> None:
        """SGLang's front end gave the leg back. If it had reached the scheduler, its end comes from there."""
        asyncio.get_running_loop().call_later(_REFUSED_S, self._not_entered, refused)

    def _not_entered(self, refused: Refused) -> None:
        inside = self._by_rid.get(refused.rid)
        if inside is not None and not inside.entered:
            self._end(End(inside.rid, Finish.ERROR, refused.reason, 0))
