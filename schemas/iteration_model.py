"""Iteration-time models as the planner learned them, node by node; what routers predict with.

    T_P = c0 + c1*sum(t_uc) + c2*sum(A) + c3*sum(t_rst) + c4*media + c5*max(0, sum(t_uc) - u0)
    T_D = d0 + d1*phi(B) + d2*B + d3*context/1e6          phi(B) = 1 - (1 - k/E)^(t_fwd*B)

with A = t_uc*t_c + t_uc*(t_uc+1)/2 per request. c4, c5 and d3 are 0 unless they lowered the held-out error.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from schemas.codec import Count, Decoder, Message, Seconds, UnixTime

Coefficient = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(ge=0, le=1)]
MEGA = 1e6


class IterationModel(msgspec.Struct, frozen=True, kw_only=True):
    """The two models of one node. Seconds per iteration (c0, d0, d1), uncached token (c1, and c5 above `u0` tokens an
    iteration), query-key pair (c2), restored token (c3), medium (c4), running request (d2), 1e6 context tokens (d3).

    `experts_per_token` of `experts` routed ones give phi, 0 for a dense model; `fed_tokens` is t_fwd.
    `uncached_per_iteration` (nu) and `restored_share` (rho: restored over cached tokens) follow the workload; None
    while nothing was seen. `prefill_error`, `decode_error`: mean relative error of `prefill_windows`, `decode_windows`
    newest windows, predicted before they were fitted; None: too few. `borrowed`: phases whose coefficients come from
    other nodes, because this one has not run them, or not at such sizes. `frozen`: warm-up is over.
    """

    node: str
    c0: Coefficient = 0.0
    c1: Coefficient = 0.0
    c2: Coefficient = 0.0
    c3: Coefficient = 0.0
    c4: Coefficient = 0.0
    c5: Coefficient = 0.0
    u0: Count = 0
    d0: Coefficient = 0.0
    d1: Coefficient = 0.0
    d2: Coefficient = 0.0
    d3: Coefficient = 0.0
    experts_per_token: Count = 0
    experts: Count = 0
    fed_tokens: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    uncached_per_iteration: Annotated[float, Meta(gt=0, le=1e12)] | None = None
    restored_share: Share | None = None
    prefill_error: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    decode_error: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    prefill_windows: Count = 0
    decode_windows: Count = 0
    borrowed: list[str] = []
    frozen: bool = False

    @property
    def expert_share(self) -> float:
        """k/E, 0 for a dense model."""
        return min(1.0, self.experts_per_token / self.experts) if self.experts else 0.0


class PlannerModels(Message, frozen=True, kw_only=True):
    """`planner.models`: the models of all nodes, every 5 s and when one was frozen; the latest stands.

    `warming_up`: the fit goes on, `warm_up_s` after it began. `target_error` is the bound that ends it.
    """

    id: str
    t: UnixTime
    models: list[IterationModel]
    warming_up: bool = False
    warm_up_s: Seconds = 0.0
    target_error: Annotated[float, Meta(ge=0, le=1e9)] = 0.0


PLANNER_MODELS = Decoder(PlannerModels)
