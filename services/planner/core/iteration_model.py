"""The iteration-time models of all nodes, learned from their iterations until warm-up ends, then frozen while good.

Afterwards what follows the workload is measured: nu (uncached tokens per prefill iteration) and rho (share of
cached tokens restored from host memory).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from schemas.iteration_model import IterationModel
from schemas.phase import Phase
from schemas.telemetry import Iteration, IterationBatch, RequestTelemetry
from services.planner.core.model_rows import Columns
from services.planner.core.options import ModelSettings
from services.planner.core.phase_fit import PhaseFit
from services.planner.core.published import adopted, decode_half, prefill_half

PHASES = (Phase.PREFILL, Phase.DECODE)
_REACH = 1
"""A fit holds for iterations up to this many octaves above the largest it has learned from."""
_MEMORY = 0.97
"""What nu and rho keep of the past per prefill iteration or request: about the last 30."""


@dataclass(slots=True)
class _Shares:
    """Decayed sums behind nu and rho."""

    iterations: float = 0.0
    uncached: float = 0.0
    cached: float = 0.0
    restored: float = 0.0

    def prefill(self, iteration: Iteration) -> None:
        self.iterations = self.iterations * _MEMORY + 1.0
        self.uncached = self.uncached * _MEMORY + iteration.uncached_tokens

    def request(self, record: RequestTelemetry) -> None:
        self.cached = self.cached * _MEMORY + record.cached_tokens
        self.restored = self.restored * _MEMORY + min(record.restored_tokens, record.cached_tokens)

    @property
    def nu(self) -> float | None:
        return self.uncached / self.iterations if self.uncached > 0 else None

    @property
    def rho(self) -> float | None:
        return min(1.0, self.restored / self.cached) if self.cached > 0 else None


@dataclass(slots=True)
class _NodeModel:
    """A node's two fits, and k and E they were made with."""

    fits: dict[Phase, PhaseFit]
    experts: tuple[int, int]
    shares: _Shares = field(default_factory=_Shares)


class LearnedModels:
    """Iterations and finished requests in, models out. `since`: when the first row came in, None before."""

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = settings
        self._nodes: dict[str, _NodeModel] = {}
        self._refit_at = float("-inf")
        self.since: float | None = None
        self.frozen_at: float | None = None
        self.late = False

    def hello(self, node: str, experts_per_token: int, experts: int) -> None:
        """k and E of a node; rows made with others say nothing about it."""
        known = (experts_per_token, experts) if experts else self._defaults
        if node not in self._nodes or self._nodes[node].experts != known:
            self._nodes[node] = self._new(known)

    def iterations(self, batch: IterationBatch, now: float) -> None:
        """Iterations of one node, as received at `now`."""
        model = self._nodes.get(batch.node)
        if model is None:
            model = self._nodes[batch.node] = self._new(self._defaults)
        for iteration in batch.iterations:
            fit = model.fits.get(iteration.phase)
            if fit is None:
                continue
            fit.add(iteration, now)
            if iteration.phase is Phase.PREFILL:
                model.shares.prefill(iteration)
            if self.since is None:
                self.since = now

    def request(self, record: RequestTelemetry) -> None:
        """A finished request: what of its cached tokens came from host memory."""
        model = self._nodes.get(record.prefill_node or "")
        if model is not None and record.output_tokens > 0:
            model.shares.request(record)

    def adopt(self, models: Iterable[IterationModel], now: float) -> None:
        """Go on with the models a planner before us had frozen."""
        for model in models:
            if not model.frozen:
                continue
            node = self._nodes[model.node] = self._new((model.experts_per_token, model.experts))
            for phase, fit in node.fits.items():
                taken = adopted(model, phase, self._settings.knee_tokens)
                if taken is not None:
                    fit.adopt(*taken)
                    fit.fed_tokens = model.fed_tokens
            self.since = self.frozen_at = now

    def advance(self, now: float, live: Iterable[str]) -> bool:
        """Time passes: close rows, fit, and end warm-up when all live nodes are good; whether anything changed."""
        closed = [fit.advance(now) for model in self._nodes.values() for fit in model.fits.values()]
        if not any(closed) or now - self._refit_at < self._settings.refit_s:
            return False
        self._refit_at = now
        for model in self._nodes.values():
            for fit in model.fits.values():
                fit.refit()
        self._freeze(now, list(live))
        return True

    @property
    def warming_up(self) -> bool:
        return self.frozen_at is None

    def warm_up_s(self, now: float) -> float:
        """Seconds since the first row, up to the end of warm-up."""
        return 0.0 if self.since is None else (now if self.frozen_at is None else self.frozen_at) - self.since

    def models(self, nodes: Iterable[str]) -> list[IterationModel]:
        """A model for each node that has one or can borrow one, in the order given."""
        found = (self._model(node) for node in nodes)
        return [model for model in found if model is not None]

    def _new(self, experts: tuple[int, int]) -> _NodeModel:
        k, total = experts
        columns = Columns(self._settings.knee_tokens, min(1.0, k / total) if total else 0.0)
        return _NodeModel({phase: PhaseFit(phase, columns, self._settings) for phase in PHASES}, experts)

    @property
    def _defaults(self) -> tuple[int, int]:
        return self._settings.experts_per_token, self._settings.experts

    def _freeze(self, now: float, live: list[str]) -> None:
        """End warm-up when all fits that can be judged are good and there is one of each phase. What a node has hardly
        run (in a split that stays, or at little work) it learns later, and borrows until then."""
        nodes = [self._nodes[name] for name in live if name in self._nodes]
        if self.frozen_at is not None:
            for fit in [fit for node in nodes for fit in node.fits.values()]:
                fit.settle(self._settings.warm_up_least_s / self._settings.row_s)
            return
        judged = [fit for node in nodes for fit in node.fits.values() if fit.error is not None and not fit.frozen]
        waited_s, good = self.warm_up_s(now), all(fit.good for fit in judged)
        late = waited_s >= self._settings.warm_up_limit_s
        if {fit.phase for fit in judged} != set(PHASES) or waited_s < self._settings.warm_up_least_s:
            return
        if good or late:
            self.frozen_at, self.late = now, not good
            for fit in judged:
                fit.freeze()

    def _model(self, name: str) -> IterationModel | None:
        node = self._nodes.get(name) or self._new(self._defaults)
        prefill, decode = (self._fit(node, phase) for phase in PHASES)
        if prefill is None and decode is None:
            return None
        k, total = node.experts
        return IterationModel(
            node=name,
            experts_per_token=k,
            experts=total,
            uncached_per_iteration=node.shares.nu,
            restored_share=node.shares.rho,
            borrowed=[fit.phase.value for fit in (prefill, decode) if fit and node.fits[fit.phase] is not fit],
            frozen=prefill is not None and prefill.settled and decode is not None and decode.settled,
            **(self._prefill_half(prefill) if prefill else {}),
            **(decode_half(decode) if decode else {}),
        )

    def _fit(self, node: _NodeModel, phase: Phase) -> PhaseFit | None:
        """The node's own fit of a phase once it can be judged, unless others have learned from much larger iterations:
        else the one among these, or among all, that is made of the most rows."""
        own = node.fits[phase]
        known = [fit for other in self._nodes.values() if (fit := other.fits[phase]).coefficients is not None]
        if own.settled or own.error is not None:
            known = [fit for fit in known if fit.settled and fit.largest > own.largest + _REACH]
            return max(known, key=lambda fit: fit.fitted_rows, default=own)
        return max(known, key=lambda fit: fit.fitted_rows, default=None)

    def _prefill_half(self, fit: PhaseFit) -> dict[str, Any]:
        """A fit that has seen no media takes their time from the one made of the most rows that has."""
        knees = self._settings.knee_tokens
        half = prefill_half(fit, knees)
        if not fit.saw_media:
            fits = [other.fits[Phase.PREFILL] for other in self._nodes.values()]
            known = [one for one in fits if one.saw_media and one.coefficients is not None]
            half["c4"] = prefill_half(max(known, key=lambda one: one.fitted_rows, default=fit), knees)["c4"]
        return half

    def check(self) -> None:
        for node in self._nodes.values():
            for fit in node.fits.values():
                fit.check()
        assert self.frozen_at is None or self.since is not None
