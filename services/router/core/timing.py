"""The two iteration-time models as the router uses them: how long a prefill takes, how long a decode iteration."""

from typing import Annotated

import msgspec
from msgspec import Meta

from schemas.iteration_model import MEGA, IterationModel

NonNegative = Annotated[float, Meta(ge=0)]


class Coefficients(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds per iteration, uncached token, query-key pair, restored token and medium (c0..c4) of a prefill iteration,
    and per token above `u0` (c5); seconds per decode iteration, for the share of experts touched, per running request
    (d0..d2) and per 1e6 tokens of context (d3).

    `uncached_per_iteration` (nu) spreads c0 over the requests of a batch; None: one iteration per request.
    `expert_share` is k/E, 0 for a dense model; `fed_tokens` are fed per decode iteration and request.
    The defaults are GLM-5.2 on four GB300 with speculative decoding; the planner's models take their place.
    """

    c0: NonNegative = 0.1
    c1: NonNegative = 3.4e-5
    c2: NonNegative = 2.35e-10
    c3: NonNegative = 2e-7
    c4: NonNegative = 0.0
    c5: NonNegative = 0.0
    u0: Annotated[int, Meta(ge=0)] = 0
    uncached_per_iteration: Annotated[float, Meta(gt=0)] | None = None
    d0: NonNegative = 0.006
    d1: NonNegative = 0.013
    d2: NonNegative = 0.0004
    d3: NonNegative = 0.0
    expert_share: Annotated[float, Meta(ge=0, le=1)] = 8 / 256
    fed_tokens: Annotated[float, Meta(gt=0)] = 4.0


DEFAULT = Coefficients()


def coefficients_of(model: IterationModel, default: Coefficients) -> Coefficients:
    """A learned model as the router reads it; a half that nobody has run yet keeps the `default`."""
    prefill = bool(model.prefill_windows)
    decode = bool(model.decode_windows)
    from_prefill, from_decode = (model if prefill else default), (model if decode else default)
    return Coefficients(
        c0=from_prefill.c0,
        c1=from_prefill.c1,
        c2=from_prefill.c2,
        c3=from_prefill.c3,
        c4=from_prefill.c4,
        c5=from_prefill.c5,
        u0=from_prefill.u0,
        uncached_per_iteration=from_prefill.uncached_per_iteration,
        d0=from_decode.d0,
        d1=from_decode.d1,
        d2=from_decode.d2,
        d3=from_decode.d3,
        expert_share=from_decode.expert_share,
        fed_tokens=from_decode.fed_tokens,
    )


class Work(msgspec.Struct, frozen=True):
    """Prompt tokens of one request at one node: computed, found cached, and of these copied from host memory; `media`
    are those not found cached."""

    uncached: int
    cached: int = 0
    restored: int = 0
    media: int = 0

    @property
    def attention_pairs(self) -> float:
        """A = t_uc*t_c + t_uc*(t_uc+1)/2."""
        return self.uncached * self.cached + self.uncached * (self.uncached + 1) / 2


def prefill_s(model: Coefficients, work: Work) -> float:
    """T_req = c0*t_uc/nu + c1*t_uc + c2*A + c3*t_rst + c4*media (+ c5 above u0): the share of the node's time that a
    request takes."""
    nu = model.uncached_per_iteration
    iterations = 1.0 if nu is None else work.uncached / nu
    knee = model.c5 * max(0, work.uncached - model.u0) if model.c5 else 0.0
    own = model.c1 * work.uncached + model.c2 * work.attention_pairs + model.c3 * work.restored
    return model.c0 * iterations + own + model.c4 * work.media + knee


def iteration_rest_s(model: Coefficients, work: Work) -> float:
    """What a request waits for beyond its share of c0: its iteration runs to its end, whoever else is in it."""
    nu = model.uncached_per_iteration
    return 0.0 if nu is None else model.c0 * max(0.0, 1.0 - work.uncached / nu)


def token_s(model: Coefficients) -> float:
    """Time to compute one more token, context left aside: what losing a cached token costs."""
    return model.c1 + (0.0 if model.uncached_per_iteration is None else model.c0 / model.uncached_per_iteration)


def decode_iteration_s(model: Coefficients, running: int, context_tokens: int = 0) -> float:
    """T_D = d0 + d1*phi(B) + d2*B + d3*context/1e6, phi(B) = 1 - (1 - k/E)^(t_fwd*B)."""
    phi = 1.0 - (1.0 - model.expert_share) ** (model.fed_tokens * running) if model.expert_share else 0.0
    return model.d0 + model.d1 * phi + model.d2 * running + model.d3 * context_tokens / MEGA
