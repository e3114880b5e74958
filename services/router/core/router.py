"""The router's decisions in one place: every open request, the nodes, the load. Events in, effects out.

The shell (or a simulator) performs the effects and feeds back what comes of them; `now` is monotonic seconds.
"""

from collections.abc import Iterable

import msgspec

from schemas.directory import MatchReply
from schemas.iteration_model import IterationModel
from schemas.kv import NodeHello
from schemas.phase import Phase, PhaseCommand
from schemas.serve import ReplyBatch, ServeReply
from schemas.telemetry import NodeTelemetry
from services.router.core.admission import Limits, context_failure, no_node_failure, open_failure, ttft_failure
from services.router.core.effects import AskDirectory, Effect, EmitTokens, End, Place, PlaceDecode, StoreContext
from services.router.core.failure import Failure
from services.router.core.load import Ledger
from services.router.core.memory import BranchMemory
from services.router.core.nodes import Node, Nodes
from services.router.core.placement import (
    DecodeView,
    FetchCost,
    PrefillView,
    Prompt,
    alone_s,
    choose_decode,
    choose_prefill,
    predict,
)
from services.router.core.request import Request
from services.router.core.siblings import Siblings
from services.router.core.spec import Places, Spec
from services.router.core.timing import DEFAULT, Coefficients, coefficients_of

UNLIMITED_TOKENS = 1 << 31
DEFAULT_FETCH = FetchCost(tokens_per_s=2.3e6, latency_s=0.002)
"""16,384 tokens in 7 ms, as reported for RDMA between hosts."""


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
    ) -> None:
        self.limits = limits
        self.nodes = Nodes(node_timeout_s)
        self.ledger = Ledger()
        self.memory = BranchMemory()
        self.siblings = Siblings()
        self.requests: dict[str, Request] = {}
        self.models: dict[str, Coefficients] = {}
        self.other_routers = 0
        self._model, self._fetch = model, fetch
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
        found = self.requests.get(request)
        if found is None:
            return Request.late_answer(request, phase, node, attempt, reply)
        return self._run(found, found.answered(phase, node, attempt, reply, now), now)

    def on_reply(self, batch: ReplyBatch, now: float) -> list[Effect]:
        """One engine's news of all its legs of this router."""
        effects: list[Effect] = []
        for update in batch.updates:
            found = self.requests.get(update.id)
            if found is not None:
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
        return self._lost([hello.node], now) if self.nodes.on_hello(hello, now) else []

    def on_telemetry(self, telemetry: NodeTelemetry, now: float) -> list[Effect]:
        """A node's heartbeat."""
        restarted = self.nodes.on_telemetry(telemetry, now)
        legs = telemetry.waiting + telemetry.running_prefill + telemetry.running_decode
        self.ledger.heartbeat(telemetry.node, legs, telemetry.running_decode, shared=self.other_routers > 0)
        return self._lost([telemetry.node], now) if restarted else []

    def on_command(self, command: PhaseCommand) -> None:
        """Nothing of the old phase is sent from here on. What waits there comes back as requeued."""
        self.nodes.on_command(command)

    def on_models(self, models: Iterable[IterationModel]) -> None:
        """The planner's iteration-time models; nodes it does not name keep the configured coefficients."""
        self.models = {model.node: coefficients_of(model, self._model) for model in models}

    def on_bus(self, *, connected: bool, now: float) -> None:
        """Without the bus the silence of nodes says nothing."""
        if connected:
            self.nodes.resume(now)
        else:
            self.nodes.suspend()

    def tick(self, now: float) -> list[Effect]:
        """To be called some ten times a second: silent nodes and legs, pauses that ended."""
        effects = self._lost(self.nodes.newly_lost(now), now)
        for request in list(self.requests.values()):
            effects += self._run(request, request.tick(now), now)
        return effects + self._ask_again(self.siblings.due(now))

    def check(self) -> None:
        """The ledger holds the open legs of open requests and nothing else."""
        self.nodes.check()
        self.ledger.check()
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
                if isinstance(effect, EmitTokens | End):
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
        prefill, decode = self._nodes(Phase.PREFILL, request, now), self._nodes(Phase.DECODE, request, now)
        if not prefill or not decode:
            missing = Phase.DECODE if prefill else Phase.PREFILL
            return request.unplaced(no_node_failure(missing, sum(1 for _ in self.nodes)), now)
        self._turn += 1
        prompt = Prompt(request.context.tokens, request.context.scheme.block_size, request.match)
        usable = {node.name for node in self.nodes if self.nodes.alive(node.name, now) and not node.refusal}
        candidates = tuple(
            predict(prompt, self._prefill_view(node, now), usable.__contains__, lambda *_: self._fetch)
            for node in prefill
        )
        if request.attempt == 1 and self._waits(request, prompt, prefill, now):
            request.held()
            return []
        best = choose_prefill(candidates, self._turn)
        refused = ttft_failure(best.ttft_s, self.limits) if request.attempt == 1 else None
        if refused is not None:
            return request.unplaced(refused, now)
        tokens = self._decode_tokens(request)
        chosen = choose_decode([self._decode_view(node) for node in decode], tokens, best.node, self._turn)
        return request.placed(Places(best, chosen.node, self._next_room(), tokens, candidates), now)

    def _waits(self, request: Request, prompt: Prompt, nodes: list[Node], now: float) -> bool:
        """Whether what another request computes is waited for rather than computed here as well."""
        pending = request.match.pending_request
        if pending is None:
            self.siblings.forget(request.id)
            return False
        ahead = self.requests.get(pending)
        alone = min(alone_s(prompt, self._prefill_view(node, now)) for node in nodes)
        return self.siblings.wait(request, ahead, alone, now)

    def _place_decode(self, request: Request, now: float) -> list[Effect]:
        nodes = [node for node in self._nodes(Phase.DECODE, request, now) if node.name not in request.tried_decode]
        if not nodes or request.places is None:
            return request.unredirected(now)
        self._turn += 1
        views = [self._decode_view(node) for node in nodes]
        chosen = choose_decode(views, self._decode_tokens(request), request.places.prefill.node, self._turn)
        return request.redirected(chosen.node, self._next_room(), now)

    def _nodes(self, phase: Phase, request: Request, now: float) -> list[Node]:
        """Live nodes of the phase, those the request failed on only if there is no other."""
        nodes = self.nodes.serving(phase, now)
        return [node for node in nodes if node.name not in request.avoided] or nodes

    def _prefill_view(self, node: Node, now: float) -> PrefillView:
        remaining, queue = self.ledger.wait(node.name, now)
        model = self.models.get(node.name, self._model)
        assert node.telemetry is not None
        pool = node.telemetry.kv.l2
        return PrefillView(node.name, remaining, queue, pool.total, pool.used, pool.referenced, model)

    def _decode_view(self, node: Node) -> DecodeView:
        running, committed = self.ledger.decoding(node.name)
        assert node.hello is not None
        capacity, limit = node.hello.capacities.l1_tokens, node.hello.capacities.running
        return DecodeView(node.name, running, committed, capacity, limit, self.models.get(node.name, self._model))

    def _decode_tokens(self, request: Request) -> int:
        """KV the answer will probably need: the prompt, and what answers have been long of late."""
        left = request.spec.sampling.max_new_tokens - len(request.answer)
        return request.context.tokens + min(left, round(self.ledger.mean_output_tokens))

    def _next_room(self) -> int:
        self._room = (self._room + 1) & ((1 << 62) - 1)
        return self._room
