"""Performs what the core decides: messages out, answers back in, tokens to the calls that wait for them."""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

from schemas.branch import BranchEvent
from schemas.codec import encode
from schemas.subjects import Subjects
from services.app import App
from services.bus import BusError, BusUnavailable, Outbox
from services.observe import RateLimitedLog
from services.router.calls import Call
from services.router.core.admission import broker_failure
from services.router.core.effects import (
    AskAgain,
    AskDirectory,
    CancelLeg,
    Effect,
    EmitTokens,
    End,
    EndBranch,
    Placed,
    ReleaseMatch,
    SendLeg,
    StoreContext,
)
from services.router.core.router import RouterCore
from services.router.core.spec import Spec
from services.router.directory import DirectoryClient
from services.router.legs import LegSender
from services.router.messages import context_event, end_event, request_telemetry
from services.router.metrics import RouterMetrics
from services.router.recent import RecentRequests
from services.router.settings import RouterSettings

_SHARED_TOKENS = 512
"""A new prefix shorter than this is not worth telling others that it will be there soon."""


class Dispatcher:
    """The only one to touch the core. Each event's effects are performed, in order, before the next event.

    `calls`: those that are open, by request. `incarnation`: this life of the router.
    """

    def __init__(self, app: App[RouterSettings], core: RouterCore, metrics: RouterMetrics, incarnation: int) -> None:
        settings = app.settings
        subjects = Subjects(settings.partition)
        self.core = core
        self.directory = DirectoryClient(app.bus, subjects, settings.match_timeout_s, settings.name, incarnation)
        self.outbox = Outbox(app.bus, RateLimitedLog(app.log, app.clock))
        self._app, self._metrics, self._subjects = app, metrics, subjects
        self._legs = LegSender(app.bus, subjects, settings.name, settings.serve_timeout_s)
        self.recent = RecentRequests()
        self._backlog_limit_bytes = settings.client_backlog_bytes
        self.calls: dict[str, Call] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def now(self) -> float:
        return self._app.clock.now()

    # -- calls ----------------------------------------------------------------------------------------------------

    def open(self, spec: Spec) -> Call:
        """Start an admitted request."""
        call = self.calls[spec.id] = Call(spec.id)
        self._idle.clear()
        self.perform(self.core.submit(spec, self.now))
        return call

    def cancel(self, call: Call) -> None:
        """The client is gone; nothing happens if the request has ended."""
        self.perform(self.core.on_cancel(call.id, self.now))

    def stop(self, call: Call) -> None:
        """A stop string was found in the call's text."""
        self.perform(self.core.on_stop(call.id, self.now))

    async def abandon(self, limit_s: float) -> None:
        """Cancel what is still open and wait, at most so long, until its engines know."""
        effects = [e for request in list(self.core.requests) for e in self.core.on_cancel(request, self.now)]
        telling = [self._legs.cancel(effect) for effect in effects if isinstance(effect, CancelLeg)]
        self.perform([effect for effect in effects if not isinstance(effect, CancelLeg)])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await asyncio.gather(*telling)

    async def idle(self) -> None:
        """Wait until no request is open and what they had to say is stored."""
        await self._idle.wait()
        await self.outbox.join()

    # -- effects --------------------------------------------------------------------------------------------------

    def perform(self, effects: list[Effect]) -> None:
        """Carry out effects in the order given; what waits for an answer goes on in a task of its own."""
        for effect in effects:
            if isinstance(effect, EmitTokens):
                self._push(effect)
            elif isinstance(effect, End):
                self._ended(effect)
            elif isinstance(effect, Placed):
                self._placed(effect)
            elif isinstance(effect, StoreContext):
                call = self.calls.get(effect.request)
                finish = "tool_calls" if call is not None and call.uses_tools else ""
                self._store(context_event(effect, self._app.clock.wall(), finish))
            elif isinstance(effect, EndBranch):
                self._store(end_event(effect, self._app.clock.wall()))
            else:
                self._spawn(self._asked(effect))

    def _placed(self, placed: Placed) -> None:
        """Headers for the client; and the directory learns where a long new prefix is being computed."""
        call, request = self.calls.get(placed.request), self.core.requests.get(placed.request)
        if call is not None:
            call.placed = placed
        if request is not None and request.context.tokens - placed.cached_tokens >= _SHARED_TOKENS:
            self._spawn(self.directory.placed(placed.request, placed.prefill_node))

    def _store(self, event: BranchEvent) -> None:
        subject = self._subjects.branch_event(event.branch, event.tenant)
        if not self.outbox.put(subject, encode(event), event.id):
            self._metrics.events_lost.labels(event.type.value).inc()

    def _push(self, emit: EmitTokens) -> None:
        """Tokens for a client; one that lets too much pile up is cancelled."""
        call = self.calls.get(emit.request)
        if call is None:
            return
        call.push(emit.tokens)
        if call.backlog_bytes > self._backlog_limit_bytes:
            self._metrics.client_cancelled("backlog")
            self.cancel(call)

    def _asked(self, effect: Effect) -> Coroutine[Any, Any, None]:
        if isinstance(effect, AskDirectory):
            return self._match(effect)
        if isinstance(effect, SendLeg):
            return self._serve(effect)
        if isinstance(effect, CancelLeg):
            return self._legs.cancel(effect)
        if isinstance(effect, AskAgain):
            return self._ask_again(effect)
        assert isinstance(effect, ReleaseMatch), effect
        return self.directory.release(effect.request)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._app.tasks.create_task(work)

    async def _match(self, ask: AskDirectory) -> None:
        request = self.core.requests.get(ask.request)
        if request is None:
            return
        match = await self.directory.match(ask.request, request.spec.identity, ask.context)
        self.perform(self.core.on_match(ask.request, ask.attempt, match, self.now))

    async def _serve(self, leg: SendLeg) -> None:
        settings = self._app.settings
        try:
            reply = await self._legs.serve(leg, settings.request_timeout_s)
        except BusUnavailable:
            failure = broker_failure(settings.broker_timeout_s)
            self.perform(self.core.on_failure(leg.request, failure, self.now))
            return
        self.perform(self.core.on_answer(leg.request, leg.phase, leg.node, leg.attempt, reply, self.now))

    async def _ask_again(self, ask: AskAgain) -> None:
        batch = await self._legs.ask_again(ask)
        if batch is None:
            return
        if batch.updates:
            self.perform(self.core.on_reply(batch, self.now))
        else:
            self.perform(self.core.on_leg_unknown(ask.request, ask.phase, ask.node, ask.attempt, self.now))

    def _ended(self, end: End) -> None:
        self._metrics.ended(end.record)
        self.calls.pop(end.request).ended(end)
        self._spawn(self._report(end))
        if not self.calls:
            self._idle.set()

    async def _report(self, end: End) -> None:
        record, clock = end.record, self._app.clock
        wall = clock.wall()
        telemetry = request_telemetry(record, wall - clock.now(), wall)
        self.recent.add(record.tenant, telemetry)
        subject = self._subjects.telemetry_request(record.prefill_node or "none")
        try:
            await self._app.bus.publish(subject, encode(telemetry))
        except BusError as error:
            self._app.log.warning("request_telemetry_lost", request=record.request, error=str(error))
