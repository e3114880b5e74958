"""The router's decisions in one place: every open request, the nodes, the load. Events in, effects out.

The shell (or a simulator) performs the effects and feeds back what comes of them; `now` is monotonic seconds.
"""

from collections.abc import Iterable

import msgspec

from schemas.directory import MatchReply
from schemas.iteration_model import IterationModel
from schemas.kv import NodeHello
from schemas.phase import Phase, PhaseCommand
from schemas.serve import LegUpdate, ReplyBatch, RequestState, ServeReply
from schemas.telemetry import NodeTelemetry
from services.router.core.admission import Limits, context_failure, no_node_failure, open_failure, ttft_failure
from services.router.core.effects import AskDirectory, Effect, EmitTokens, End, Place, PlaceDecode, StoreContext
from services.router.core.failure import Failure
from services.router.core.growth import calm_until, grow, only_grows
from services.router.core.load import Ledger
from services.router.core.memory import BranchMemory
from services.router.core.nodes import Nodes
from services.router.core.placement import FetchCost, Prompt
from services.router.core.placer import Placer
from services.router.core.request import Request
from services.router.core.roster import Mask
from services.router.core.siblings import Siblings
from services.router.core.spec import Places, Spec
from services.router.core.timing import DEFAULT, Coefficients, coefficients_of

UNLIMITED_TOKENS = 1 << 31
DEFAULT_FETCH = FetchCost(tokens_per_s=2.3e6, latency_s=0.002)
"""16,384 tokens in 7 ms, as reported for RDMA between hosts."""
DEFAULT_HANDOFF = FetchCost(tokens_per_s=2e6, latency_s=0.0)
"""48 kB of KV a token at 100 GB/s, from device to device."""


_PROMPT_IS_THERE = (EmitTokens, End)


class RouterCore:
    """Admission, placement and the life of all requests of one router.

    `rooms_from`: first room number; rooms must differ between routers and restarts, so the caller draws it at random.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        rooms_from: int,
        node_timeout_s: float = 3.0,
        model: Coefficients = DEFAULT,
        fetch: FetchCost = DEFAULT_FETCH,
        handoff: FetchCost = DEFAULT_HANDOFF,
        order_weight: float = 0.0,
        resume_tokens: int = 0,
    ) -> None:
        self.limits = limits
        self.nodes = Nodes(node_timeout_s)
        self.ledger = Ledger(order_weight=order_weight)
        self.placer = Placer(self.nodes, self.ledger, model, fetch, handoff, resume_tokens)
        self.memory = BranchMemory()
        self.siblings = Siblings()
        self.requests: dict[str, Request] = {}
        self.other_routers = 0
        self._model = model
        self._room, self._turn = rooms_from, 0

    # -- requests -------------------------------------------------------------------------------------------------

    @property
    def max_context_tokens(self) -> int:
        """Tokens of prompt and answer: the smaller of our own limit and the cluster's."""
        hello = self.nodes.reference
        cluster = hello.max_context_tokens if hello else 0
        return min(self.limits.max_context_tokens or UNLIMITED_TOKENS, cluster or UNLIMITED_TOKENS)

    def admission(self, prompt_tokens: int, new_tokens: int | None) -> Failure | None:
        """Why a request of this size is refused before anything is done for it."""
        too_long = context_failure(prompt_tokens, new_tokens, self.max_context_tokens)
        return too_long or open_failure(len(self.requests), self.limits)

    def submit(self, spec: Spec, now: float) -> list[Effect]:
        """Take a request that passed `admission`. ValueError: its id is open already."""
        if spec.id in self.requests:
            raise ValueError(f"request {spec.id} is open already")
        request = self.requests[spec.id] = Request(spec, now)
        return self._run(request, request.start(), now)

    def on_match(self, request: str, attempt: int, match: MatchReply | None, now: float) -> list[Effect]:
        """The directory's answer, or None after its budget: then the branch's last nodes are a guess."""
        found = self.requests.get(request)
        if found is None:
            return []
        if match is None:
            identity = found.spec.identity
            match = self.memory.recall(identity.tenant, identity.branch, found.context)
        elif match.pending_request is not None:
            match = self._located(match, match.pending_request)
        return self._run(found, found.matched(attempt, match), now)

    def on_answer(
        self, request: str, phase: Phase, node: str, attempt: int, reply: ServeReply | None, now: float
    ) -> list[Effect]:
        """A node's answer to a leg, None for none. Of an ended request: the leg is cancelled."""
        if reply is not None and not reply.accepted and reply.reason == "phase":
            self.nodes.on_refusal(node, phase, reply.epoch)
            self.placer.changed(node)
        found = self.requests.get(request)
        if found is None:
            return Request.late_answer(request, phase, node, attempt, reply)
        return self._run(found, found.answered(phase, node, attempt, reply, now), now)

    def on_reply(self, batch: ReplyBatch, now: float) -> list[Effect]:
        """One engine's news of all its legs of this router."""
        effects: list[Effect] = []
        for update in batch.updates:
            found = self.requests.get(update.id)
            if found is None:
                continue
            if only_grows(found, batch.node, update):
                if fresh := grow(found, update, now):
                    effects.append(EmitTokens(update.id, fresh))
                continue
            if update.state is RequestState.READY:
                self._fetched(found, batch.node, update, now)
            effects += self._run(found, found.updated(batch.node, update, now), now)
        return effects

    def on_leg_unknown(self, request: str, phase: Phase, node: str, attempt: int, now: float) -> list[Effect]:
        """A node that was asked says it has no such leg."""
        found = self.requests.get(request)
        return self._run(found, found.leg_unknown(phase, node, attempt, now), now) if found else []

    def on_cancel(self, request: str, now: float) -> list[Effect]:
        """The client is gone."""
        found = self.requests.get(request)
        return self._run(found, found.cancelled(now), now) if found else []

    def on_stop(self, request: str, now: float) -> list[Effect]:
        """A stop string was found in the answer's text."""
        found = self.requests.get(request)
        return self._run(found, found.stopped(now), now) if found else []

    def on_failure(self, request: str, failure: Failure, now: float) -> list[Effect]:
        """Something outside the cluster's nodes failed for good: the broker, or a message that cannot be sent."""
        found = self.requests.get(request)
        return self._run(found, found.failed(failure, now), now) if found else []

    # -- nodes ----------------------------------------------------------------------------------------------------

    def on_hello(self, hello: NodeHello, now: float) -> list[Effect]:
        """What a node is; a new engine incarnation means that its requests are gone."""
        restarted = self.nodes.on_hello(hello, now)
        for node in self.nodes:
            self.placer.changed(node.name)
        if restarted:
            self.placer.fetches.forget(hello.node)
        return self._lost([hello.node], now) if restarted else []

    def on_telemetry(self, telemetry: NodeTelemetry, now: float) -> list[Effect]:
        """A node's heartbeat."""
        restarted = self.nodes.on_telemetry(telemetry, now)
        self.placer.changed(telemetry.node)
        legs = telemetry.waiting + telemetry.running_prefill + telemetry.running_decode
        self.ledger.heartbeat(telemetry.node, legs, telemetry.running_decode, shared=self.other_routers > 0)
        return self._lost([telemetry.node], now) if restarted else []

    def on_command(self, command: PhaseCommand) -> None:
        """Nothing of the old phase is sent from here on. What waits there comes back as requeued."""
        self.nodes.on_command(command)
        self.placer.changed(command.node)

    def on_models(self, models: Iterable[IterationModel]) -> None:
        """The planner's iteration-time models; nodes it does not name keep the configured coefficients."""
        self.placer.learned({model.node: coefficients_of(model, self._model) for model in models})

    def on_bus(self, *, connected: bool, now: float) -> None:
        """Without the bus the silence of nodes says nothing."""
        if connected:
            self.nodes.resume(now)
        else:
            self.nodes.suspend()

    def tick(self, now: float) -> list[Effect]:
        """To be called some ten times a second: silent nodes and legs, pauses that ended."""
        effects = self._lost(self.nodes.newly_lost(now), now)
        for request in [request for request in self.requests.values() if request.look_at <= now]:
            effects += self._run(request, request.tick(now), now)
            request.look_at = calm_until(request)
        return effects + self._ask_again(self.siblings.due(now))

    def check(self) -> None:
        """The ledger holds the open legs of open requests and nothing else."""
        self.nodes.check()
        self.ledger.check()
        self.placer.check()
        self.memory.check()
        self.siblings.check(set(self.requests))
        booked = {id_: request.bookings() for id_, request in self.requests.items()}
        assert self.ledger.booked() == {id_: tuple(found) for id_, found in booked.items() if found}
        for request in self.requests.values():
            request.check()
            assert not request.ended

    # -- inside ---------------------------------------------------------------------------------------------------

    def _located(self, match: MatchReply, pending: str) -> MatchReply:
        """Where a pending prefix is being computed we know best when it is a request of ours."""
        ahead = self.requests.get(pending)
        if ahead is None or ahead.places is None:
            return match
        return msgspec.structs.replace(match, pending_node=ahead.places.prefill.node)

    def _lost(self, nodes: Iterable[str], now: float) -> list[Effect]:
        effects: list[Effect] = []
        for node in nodes:
            for request in list(self.requests.values()):
                effects += self._run(request, request.node_lost(node, now), now)
        return effects

    def _run(self, request: Request, effects: list[Effect], now: float) -> list[Effect]:
        """Perform the effects that are the core's own, keep the ledger in step, pass on the rest."""
        out: list[Effect] = []
        request.look_at = now
        pending = effects[::-1]
        while pending:
            effect = pending.pop()
            if isinstance(effect, Place):
                pending += self._place(request, now)[::-1]
            elif isinstance(effect, PlaceDecode):
                pending += self._place_decode(request, now)[::-1]
            else:
                out.append(effect)
                self._learn(request, effect)
                if self.siblings.awaits(request.id) and isinstance(effect, _PROMPT_IS_THERE):
                    out += self._ask_again(self.siblings.there(request.id))
        if request.changed:
            request.changed = False
            self.ledger.set(request.id, request.bookings())
        return out

    def _ask_again(self, held: Iterable[str]) -> list[Effect]:
        """These requests waited for another's prefix: where does theirs lie now?"""
        found = (self.requests.get(id_) for id_ in held)
        return [AskDirectory(request.id, request.attempt, request.context) for request in found if request is not None]

    def _learn(self, request: Request, effect: Effect) -> None:
        if isinstance(effect, StoreContext):
            self.memory.store(effect)
        elif isinstance(effect, End):
            del self.requests[request.id]
            self.siblings.forget(request.id)
            if request.places is not None and effect.record.outcome.answered:
                self.ledger.served(request.places.prefill.service_s, effect.record.output_tokens)

    def _place(self, request: Request, now: float) -> list[Effect]:
        prefill = self.placer.serving(Phase.PREFILL, request.avoided, now)
        decode = self.placer.serving(Phase.DECODE, request.avoided, now)
        if not prefill.any() or not decode.any():
            missing = Phase.DECODE if prefill.any() else Phase.PREFILL
            return request.unplaced(no_node_failure(missing, len(self.placer.roster)), now)
        self._turn += 1
        context = request.context
        prompt = Prompt(context.tokens, context.scheme.block_size, request.match, context.media_ends)
        if request.attempt == 1 and self._waits(request, prompt, prefill, now):
            request.held()
            return []
        candidates = self.placer.predict(prompt, prefill, now, decode if request.attempt == 1 else None)
        best = candidates.best(self._turn)
        refused = ttft_failure(best.ttft_s, self.limits) if request.attempt == 1 else None
        if refused is not None:
            return request.unplaced(refused, now)
        tokens = self._decode_tokens(request)
        if best.resume:
            return request.placed(Places(best, best.node, self._next_room(), tokens, candidates), now)
        chosen = self.placer.choose_decode(request.match, tokens, decode, best.node, self._turn)
        return request.placed(Places(best, chosen, self._next_room(), tokens, candidates), now)

    def _fetched(self, request: Request, node: str, update: LegUpdate, now: float) -> None:
        """Learn from a fetch that has ended: it began when the leg was sent, and had one source."""
        places, placed = request.places, request.times.placed
        if update.attempt != request.attempt or places is None or placed is None:
            return
        if update.phase is Phase.PREFILL and places.prefill.node == node and len(places.prefill.fetch) == 1:
            source = places.prefill.fetch[0]
            tokens = (source.last - source.first) * request.context.scheme.block_size
            self.placer.fetches.observe(source.node, node, tokens, now - placed)

    def _waits(self, request: Request, prompt: Prompt, prefill: Mask, now: float) -> bool:
        """Whether what another request computes is waited for rather than computed here as well."""
        pending = request.match.pending_request
        if pending is None:
            self.siblings.forget(request.id)
            return False
        alone = msgspec.structs.replace(
            prompt, match=msgspec.structs.replace(prompt.match, pending_blocks=0, pending_node=None)
        )
        least_s = self.placer.predict(alone, prefill, now).least_alone_s()
        return self.siblings.wait(request, self.requests.get(pending), least_s, now)

    def _place_decode(self, request: Request, now: float) -> list[Effect]:
        decode = self.placer.serving(Phase.DECODE, request.avoided, now)
        for name in request.tried_decode:
            row = self.placer.roster.index.get(name)
            if row is not None:
                decode[row] = False
        if not decode.any() or request.places is None:
            return request.unredirected(now)
        self._turn += 1
        tokens, prefill = self._decode_tokens(request), request.places.prefill.node
        chosen = self.placer.choose_decode(request.match, tokens, decode, prefill, self._turn)
        return request.redirected(chosen, self._next_room(), now)

    def _decode_tokens(self, request: Request) -> int:
        """KV the answer will probably need: the prompt, and what answers have been long of late."""
        left = request.spec.sampling.max_new_tokens - len(request.answer)
        return request.context.tokens + min(left, round(self.ledger.mean_output_tokens))

    def _next_room(self) -> int:
        self._room = (self._room + 1) & ((1 << 62) - 1)
        return self._room
