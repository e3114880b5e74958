"""Our engines under the product's own cores: directory, placement, ledger, planner. `ours` and what differs from it.

Everything decided here is decided by `services.router.core`, `services.directory.core` and `services.planner.core`;
this file is only their shell in virtual time. `static-own` is the same without a planner's orders.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from schemas.directory import MatchReply
from schemas.iteration_model import IterationModel
from schemas.phase import Phase, Split
from schemas.telemetry import NodeTelemetry
from services.engine.core.timing import PrefillTerms
from services.planner.core.options import OFF, ON, DecideSettings, ModelSettings
from services.planner.core.policy import PlannerSettings
from services.router.core.load import Booking, Ledger
from services.router.core.nodes import Nodes
from services.router.core.placement import Candidate, FetchCost, Prompt
from services.router.core.placer import Placer
from services.router.core.roster import Mask
from services.router.core.timing import Coefficients, coefficients_of
from services.simulator.call import Call
from services.simulator.directory import TICK_S, SimulatedDirectory
from services.simulator.passive import Passive
from services.simulator.planner import SimulatedPlanner
from services.simulator.system import Action, Cluster, Load, Place, Traits
from services.simulator.telemetry import command_of, hello_of

SYMMETRIC = Traits(shared_pool=True, counted=True, load=Load.WAITING, writes_output=True, order_weight=2.0)
_FOREVER_S = 1e12


@dataclass(frozen=True, slots=True)
class OwnSettings:
    """What of the product is on. `decode_in_turn`: round robin instead of the predicted iteration time.

    `planner`: orders splits, after warm-up first the one that the nodes began with; off: models are learned all the
    same, for routing.
    """

    planner: bool = True
    decide: DecideSettings = field(default_factory=DecideSettings)
    warm_up: bool = True
    decode_in_turn: bool = False


class Own(Passive):
    """The product. Use `SimulatedPlanner.decisions` to see why it switched."""

    id = "ours"
    traits = SYMMETRIC
    directory: SimulatedDirectory
    planner: SimulatedPlanner

    def __init__(self, settings: OwnSettings | None = None, *, id: str = "ours", traits: Traits = SYMMETRIC) -> None:  # noqa: A002
        self.id, self.traits = id, traits
        self.settings = settings or OwnSettings()
        self._ledger = Ledger(order_weight=traits.order_weight)
        self._nodes = Nodes(_FOREVER_S)
        self._booked: dict[str, tuple[Booking, Booking]] = {}
        self._lineage: dict[str, tuple[str, int]] = {}
        self._turn = 0
        self._tick_at = 0.0
        self._heard_models: dict[str, IterationModel] = {}

    def begin(self, cluster: Cluster, now: float) -> None:
        super().begin(cluster, now)
        times, hardware = cluster.times, cluster.hardware
        self._default = Coefficients(
            c0=times.c0,
            c1=times.c1,
            c2=times.c2,
            c3=times.c3,
            c4=times.c4,
            d0=times.d0,
            d1=times.d1,
            d2=times.d2,
            d3=times.d3,
            expert_share=times.active_share,
            fed_tokens=times.fed_tokens,
        )
        fetch = FetchCost(hardware.host_link / hardware.kv_bytes_per_token, hardware.latency_s)
        handoff = FetchCost(hardware.device_link / hardware.kv_bytes_per_token, hardware.latency_s)
        self._placer = Placer(self._nodes, self._ledger, self._default, fetch, handoff)
        self.directory = SimulatedDirectory(cluster, counted=self.traits.counted, now=now)
        settings = PlannerSettings(
            block_size=cluster.block_tokens,
            mode=ON if self.settings.planner else OFF,
            initial_split=str(Split(*(len(cluster.serving(phase)) for phase in (Phase.PREFILL, Phase.DECODE)))),
            warm_up=self.settings.warm_up,
            model=ModelSettings(),
            decide=self.settings.decide,
        )
        self.planner = SimulatedPlanner(settings, cluster, now)
        for name, node in cluster.nodes.items():
            self._nodes.on_hello(hello_of(name, node, cluster), now)
        self._heard(now)

    def _heard(self, now: float) -> list[NodeTelemetry]:
        """Heartbeats reach the router."""
        beats = self.planner.beats(now)
        for beat in beats:
            self._nodes.on_telemetry(beat, now)
            self._placer.changed(beat.node)
        return beats

    # requests

    def arrived(self, call: Call, now: float) -> Sequence[Action]:
        match = self._match(call, now)
        self._lineage[call.id] = match.lineage, match.known_blocks * self.cluster.block_tokens
        self._turn += 1
        prompt = Prompt(call.prompt_tokens, self.cluster.block_tokens, match, (call.prompt_tokens,) * call.media)
        best = self._placer.predict(prompt, self._prefill_rows(call, now), now).best(self._turn)
        decode = self._decode_node(call, match, best, now)
        self._book(call, best, decode, now)
        self.directory.placed(call, best.node, now)
        return (Place(call, best.node, decode, best.fetch, best.ttft_s, best.work.cached),)

    def _match(self, call: Call, now: float) -> MatchReply:
        """Where its prefix lies."""
        return self.directory.match(call, now)

    def _prefill_rows(self, call: Call, now: float) -> Mask:
        """The nodes to choose from."""
        return self._placer.serving(Phase.PREFILL, (), now)

    def _decode_node(self, call: Call, match: MatchReply, best: Candidate, now: float) -> str:
        decode = self._placer.serving(Phase.DECODE, (), now)
        if self.settings.decode_in_turn:
            rows = np.flatnonzero(decode)
            return self._placer.roster.names[int(rows[self._turn % len(rows)])]
        return self._placer.choose_decode(match, self._need(call), decode, best.node, self._turn)

    def _need(self, call: Call) -> int:
        """KV the answer will probably need; how long it gets nobody knows yet."""
        return call.prompt_tokens + round(self._ledger.mean_output_tokens)

    def _book(self, call: Call, best: Candidate, decode: str, now: float) -> None:
        need = self._need(call)
        booked = (
            Booking(Phase.PREFILL, best.node, best.service_s, need, placed=now),
            Booking(Phase.DECODE, decode, 0.0, need),
        )
        self._booked[call.id] = booked
        self._ledger.set(call.id, booked)

    def prefill_started(self, call: Call, now: float) -> None:
        prefill, decode = self._booked[call.id]
        started = msgspec.structs.replace(prefill, started=now)
        self._booked[call.id] = started, decode
        self._ledger.set(call.id, (started, decode))

    def prefilled(self, call: Call, now: float) -> Sequence[Action]:
        self._ledger.set(call.id, (self._booked[call.id][1],))
        return ()

    def ended(self, call: Call, now: float) -> Sequence[Action]:
        self._ledger.set(call.id, ())
        prefill, _ = self._booked.pop(call.id)
        self._ledger.served(prefill.service_s, call.output_tokens)
        lineage, known = self._lineage.pop(call.id)
        self.directory.answered(call, now)
        self.planner.answered(call, lineage, known, now)
        return ()

    # the planner

    def next_wake(self, now: float) -> float | None:
        return self._tick_at

    def wake(self, now: float) -> Sequence[Action]:
        self._tick_at = now + TICK_S
        self.directory.tick(now)
        moves = self.planner.tick(self._heard(now), now)
        if self.planner.models is not self._heard_models:
            self._heard_models = self.planner.models
            learned = {name: coefficients_of(model, self._default) for name, model in self._heard_models.items()}
            self._placer.learned(learned)
        for move in moves:
            if move.phase is not None:
                epoch = self.planner.epoch(move.node)
                self._nodes.on_command(command_of(move.node, move.phase, epoch, now))
                self._placer.changed(move.node)
                self.directory.commanded(move.node, move.phase, now)
        return moves

    def moved(self, node: str, now: float) -> Sequence[Action]:
        self.planner.moved(node, now)
        return ()

    # what nodes report

    def stored(self, node: str, tier: str, parent: int | None, keys: "array[int]", now: float) -> None:
        self.directory.stored(node, tier, parent, keys, now)

    def removed(self, node: str, tier: str, parent: int | None, keys: "array[int]", now: float) -> None:
        self.directory.removed(node, tier, parent, keys, now)

    def cleared(self, node: str, tier: str, now: float) -> None:
        self.directory.cleared(node, tier, now)

    def prefill_iterated(
        self, node: str, terms: PrefillTerms, cached_tokens: int, duration_s: float, now: float
    ) -> None:
        self.planner.prefill_iterated(node, terms, cached_tokens, duration_s, now)

    def decode_iterated(
        self, node: str, count: int, requests: int, context_tokens: float, duration_s: float, now: float
    ) -> None:
        self.planner.decode_iterated(node, count, requests, context_tokens, duration_s, now)
