"""Runs the queue core: its effects become calls of backend, pool, peers and routers, their answers its next inputs."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from structlog.typing import FilteringBoundLogger

from schemas.kv import LocationChange
from schemas.phase import Phase, PhaseCommand
from schemas.serve import (
    CancelReply,
    CancelRequest,
    Finish,
    Handoff,
    HandoffReply,
    HandoffVerb,
    LegUpdate,
    RequestState,
    ServeReply,
    ServeRequest,
)
from schemas.telemetry import Iteration
from services.clock import Clock
from services.engine.backend import Backend, Leg, LegKey
from services.engine.core import effects as fx
from services.engine.core.answers import Answers, by_length
from services.engine.core.legs import QueuedLeg
from services.engine.core.queueing import Queueing
from services.engine.core.timing import ObservedPrefill
from services.engine.metrics import EngineMetrics
from services.engine.node_pool import NodePool
from services.engine.peers import Peers, handoff_message
from services.engine.prompts import Prompt, PromptLost, PromptReader, prompt_of
from services.engine.replies import Replies


class EngineDead(Exception):
    """The engine has failed; all legs inside it are lost."""


class Reports(Protocol):
    """Where the node's news go."""

    def iteration(self, iteration: Iteration) -> None: ...

    def phase(self, report: fx.PhaseReport) -> None: ...


@dataclass(frozen=True, slots=True)
class Surroundings:
    """All that the runner performs effects with. `pool` None: a node without host memory."""

    backend: Backend
    pool: NodePool | None
    peers: Peers
    prompts: PromptReader
    replies: Replies
    reports: Reports
    clock: Clock
    metrics: EngineMetrics
    log: FilteringBoundLogger
    listening: Callable[[], bool]
    observed: ObservedPrefill | None = None
    debug_checks: bool = False


class Runner:
    """The only one to touch the core. Inputs come on the event loop; their effects are performed before they return."""

    def __init__(self, core: Queueing, around: Surroundings, tasks: asyncio.TaskGroup) -> None:
        self.core, self.around = core, around
        self.answers = Answers()
        self.dead = ""
        self._tasks = tasks
        self._prompts: dict[LegKey, Prompt] = {}
        self._effects: deque[fx.Effect] = deque()
        self._performing = False
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()

    @property
    def now(self) -> float:
        return self.around.clock.now()

    # Inputs

    def serve(self, request: ServeRequest) -> ServeReply:
        key = LegKey(request.id, request.attempt, request.phase)
        reply, effects = self.core.serve(request, self.now)
        if not reply.accepted:
            self.around.metrics.refused.labels(reply.reason).inc()
        elif request.tokens and key not in self._prompts and self.core.table.find(key) is not None:
            self._prompts[key] = prompt_of(request, request.tokens, self.around.backend.info)
        self.perform(effects)
        return reply

    def cancel(self, request: CancelRequest) -> CancelReply:
        reply, effects = self.core.cancel(request.id, request.attempt, request.phase, self.now)
        self.perform(effects)
        return reply

    def handoff(self, message: Handoff) -> HandoffReply:
        room = self.around.backend.room(Phase.DECODE)
        reply, effects = self.core.handoff(message, self.now, room)
        self.perform(effects)
        return reply

    def resend(self, key: LegKey, seq: int) -> LegUpdate | None:
        self.around.metrics.resent.inc()
        return self.answers.since(key, seq)

    def command(self, command: PhaseCommand) -> None:
        self.perform(self.core.command(command, self.now))

    def decoding_by_length(self) -> list[int]:
        """Running decode requests by the tokens they have given."""
        return by_length(self.answers.given(key) for key in self.core.table.inside[Phase.DECODE])

    async def drain(self) -> None:
        """Give back what waits; return when all that runs has ended and every router knows."""
        self.perform(self.core.drain(self.now))
        while not self.core.idle():
            self._idle.clear()
            await self._idle.wait()
        await self.around.replies.sent()

    async def run(self) -> None:
        """Step the core whenever something has happened or is due; raises when the engine is dead."""
        while True:
            self._wake.clear()
            room = self.around.backend.room(Phase.PREFILL)
            self.perform(self.core.step(self.now, room, listening=self.around.listening()), wake=False)
            self.around.metrics.counts(self.core.counts())
            if self.core.idle():
                self._idle.set()
            due_s = max(0.0, self.core.next_due(self.now) - self.now)
            await self._woken(due_s)

    async def _woken(self, limit_s: float) -> None:
        if self.dead:
            raise EngineDead(self.dead)
        try:
            async with asyncio.timeout(limit_s):
                await self._wake.wait()
        except TimeoutError:
            return

    # Events of the engine

    def state(self, key: LegKey, state: RequestState) -> None:
        self.perform(self.core.entered(key, state))

    def tokens(self, key: LegKey, first_index: int, tokens: list[int]) -> None:
        leg = self.core.table.inside[key.phase].get(key)
        if leg is None or leg.ending is not None:
            return
        update = self.answers.tokens(key, first_index, tokens)
        if update is not None:
            self.around.replies.add(leg.request.router, update)
        self._mark_completed(leg)
        if key.phase is Phase.PREFILL and first_index == 0 and tokens:
            self.perform(self.core.first_token(key, tokens[0]))

    def ended(self, key: LegKey, finish: Finish, reason: str, cached_tokens: int, restored_tokens: int) -> None:
        self.perform(self.core.left(key, finish, reason, cached_tokens, restored_tokens, self.now))

    def iteration(self, iteration: Iteration) -> None:
        around = self.around
        around.metrics.iteration(iteration)
        around.reports.iteration(iteration)
        if around.observed is not None and iteration.phase is Phase.PREFILL:
            around.observed.observe(iteration.uncached_tokens, iteration.duration_s)
        self._wake.set()

    def device_changes(self, changes: list[LocationChange]) -> None:
        if self.around.pool is not None:
            self.around.pool.device_changes(changes)

    def failed(self, reason: str) -> None:
        self.dead = reason
        self._wake.set()

    # Effects

    def perform(self, effects: list[fx.Effect], *, wake: bool = True) -> None:
        """Carry effects out in order; those that follow from one come before the next one."""
        self._effects.extendleft(reversed(effects))
        if wake:
            self._wake.set()
        if self._performing:
            return
        self._performing = True
        try:
            while self._effects:
                self._perform(self._effects.popleft())
        finally:
            self._performing = False
        if self.around.debug_checks:
            self.core.check()

    def _perform(self, effect: fx.Effect) -> None:
        around = self.around
        match effect:
            case fx.Report():
                self._report(effect)
            case fx.Fetch():
                self._start(self._fetch(effect))
            case fx.Release(fetch_id):
                if around.pool is not None:
                    self._start(around.pool.release(fetch_id))
            case fx.Ask():
                self._ask(effect)
            case fx.Tell():
                self._tell(effect)
            case fx.Submit(key):
                self._submit(key, effect)
            case fx.CancelInside(key):
                around.backend.cancel(key)
            case fx.Prefilled(key, token):
                around.backend.prefilled(key, token)
            case fx.ReadPrompt(key):
                self._start(self._read_prompt(key))
            case fx.FetchGivenUp(key, waited_s):
                around.metrics.fetch_deadline.inc()
                around.log.info("fetch_given_up", request=key.id, waited_s=round(waited_s, 3))
            case fx.Forget(key):
                self.answers.forget(key)
            case fx.PhaseReport():
                around.reports.phase(effect)
                if effect.took_s is not None:
                    around.metrics.switches.observe(effect.took_s)
            case fx.DropDecodeCache():
                around.backend.drop_decode_cache()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.create_task(work)

    def _report(self, report: fx.Report) -> None:
        key = report.key
        if report.finish is None:
            assert report.state is not None
            self.around.replies.add(report.router, self.answers.state(key, report.state))
            return
        leg_prompt = self._prompts.pop(key, None)
        prefill = key.phase is Phase.PREFILL
        update = self.answers.end(
            key,
            report.finish,
            report.reason,
            report.stop_token_ids,
            report.cached_tokens if prefill else None,
            report.restored_tokens if prefill else None,
        )
        self.around.replies.add(report.router, update)
        self.around.metrics.ended.labels(key.phase, report.finish).inc()
        if prefill and leg_prompt is not None and report.cached_tokens:
            self.around.metrics.tokens.labels("cached").inc(report.cached_tokens)

    async def _fetch(self, effect: fx.Fetch) -> None:
        around, key = self.around, effect.key
        if around.pool is None:
            self.perform(self.core.fetched(effect.fetch_id, 0))
            return
        started = self.now
        prompt = self._prompts.get(key)
        blocks = 0
        if prompt is not None:
            usable = self.core.limits.usable_blocks(len(prompt.tokens) // 4)
            reply = await around.pool.fetch(effect.fetch_id, prompt.digests[:usable], effect.sources)
            blocks = reply.blocks
        around.metrics.fetches.observe(self.now - started)
        self.perform(self.core.fetched(effect.fetch_id, blocks))

    async def _read_prompt(self, key: LegKey) -> None:
        leg = self.core.table.find(key)
        if leg is None:
            return
        try:
            tokens = await self.around.prompts.read(leg.request)
            data = await self.around.prompts.read_media(leg.request)
        except PromptLost as error:
            self.perform(self.core.prompt_lost(key, str(error), self.now))
            return
        if self.core.table.find(key) is leg:
            prompt = self._prompts[key] = prompt_of(leg.request, tokens, self.around.backend.info, data)
            if self.around.pool is not None:
                self.around.pool.marks.note(prompt.marked())
            self.perform(self.core.prompt_read(key))

    def _mark_completed(self, leg: QueuedLeg) -> None:
        """A block that begins in a prompt with media is known by its key when the answer has filled it."""
        prompt, pool, info = self._prompts.get(leg.key), self.around.pool, self.around.backend.info
        if prompt is None or not prompt.marks or pool is None:
            return
        answer = self.answers.kept[leg.key].tokens[: info.block_size + 1]
        if len(answer) <= info.block_size:
            pool.marks.note(prompt.completed(leg.request, answer.tobytes(), info))

    def _ask(self, ask: fx.Ask) -> None:
        message = handoff_message(HandoffVerb.RESERVE, ask, self.core.limits.node, self.around.backend.info)
        if ask.peer == self.core.limits.node:
            reply, effects = self.core.handoff(message, self.now, self.around.backend.room(Phase.DECODE))
            self.perform([*effects, *self.core.answered(ask.number, reply, self.now)])
            return
        self._start(self._ask_peer(ask, message))

    async def _ask_peer(self, ask: fx.Ask, message: Handoff) -> None:
        reply = await self.around.peers.ask(ask.peer, message)
        outcome = "unanswered" if reply is None else "granted" if reply.granted else reply.reason
        self.around.metrics.handoffs.labels(message.verb, outcome).inc()
        self.perform(self.core.answered(ask.number, reply, self.now))

    def _tell(self, tell: fx.Tell) -> None:
        message = handoff_message(tell.verb, tell, self.core.limits.node, self.around.backend.info)
        if tell.peer == self.core.limits.node:
            reply = self.handoff(message)
            if tell.verb is HandoffVerb.DONE:
                self.perform(self.core.told(tell.key, "" if reply.granted else reply.reason, self.now))
            return
        self._start(self._tell_peer(tell, message))

    async def _tell_peer(self, tell: fx.Tell, message: Handoff) -> None:
        lost = await self.around.peers.tell(tell.peer, message)
        self.around.metrics.handoffs.labels(message.verb, lost or "taken").inc()
        if tell.verb is HandoffVerb.DONE:
            self.perform(self.core.told(tell.key, lost, self.now))

    def _submit(self, key: LegKey, effect: fx.Submit) -> None:
        queued = self.core.table.inside[key.phase].get(key)
        assert queued is not None, key
        self.around.metrics.queued.labels(key.phase).observe(self.now - queued.arrived_at)
        self.around.backend.submit(self._leg(queued, effect))

    def _leg(self, queued: QueuedLeg, effect: fx.Submit) -> Leg:
        request, prompt = queued.request, self._prompts[queued.key]
        session = f"{request.branch}@{request.version or 0}" if request.branch is not None else None
        return Leg(
            key=queued.key,
            tokens=prompt.tokens,
            prompt_tokens=request.prompt_tokens,
            sampling=request.sampling,
            room=request.room,
            peer=request.peer,
            rendezvous=effect.rendezvous,
            digests=prompt.digests,
            restorable_blocks=effect.restorable_blocks,
            session=session,
            cache_salt=request.cache_salt,
            extra_key=request.extra_key,
            media=tuple(request.media),
            data=prompt.data,
        )
