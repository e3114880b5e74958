"""The two iteration-time models as the router uses them: how long a prefill takes, how long a decode iteration."""

from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

NonNegative = Annotated[float, Meta(ge=0)]


class Coefficients(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds per iteration, uncached token, query-key pair and restored token (c0..c3) of a prefill iteration;

    seconds per decode iteration, for the share of experts touched, and per running request (d0..d2).
    `uncached_per_iteration` (nu) spreads c0 over the requests of a batch; None: one iteration per request.
    `expert_share` is k/E, 0 for a dense model; `fed_tokens` are fed per decode iteration and request.
    The defaults are GLM-5.2 on four GB300 with speculative decoding.
    """

    c0: NonNegative = 0.1
    c1: NonNegative = 3.4e-5
    c2: NonNegative = 2.35e-10
    c3: NonNegative = 2e-7
    uncached_per_iteration: Annotated[float, Meta(gt=0)] | None = None
    d0: NonNegative = 0.006
    d1: NonNegative = 0.013
    d2: NonNegative = 0.0004
    expert_share: Annotated[float, Meta(ge=0, le=1)] = 8 / 256
    fed_tokens: Annotated[float, Meta(gt=0)] = 4.0


DEFAULT = Coefficients()


@dataclass(frozen=True, slots=True)
class Work:
    """Prompt tokens of one request at one node: computed, found cached, and of these copied from host memory."""

    uncached: int
    cached: int = 0
    restored: int = 0

    @property
    def attention_pairs(self) -> float:
        """A = t_uc*t_c + t_uc*(t_uc+1)/2."""
        return self.uncached * self.cached + self.uncached * (self.uncached + 1) / 2


def prefill_s(model: Coefficients, work: Work) -> float:
    """T_req = c0*t_uc/nu + c1*t_uc + c2*A + c3*t_rst."""
    nu = model.uncached_per_iteration
    iterations = 1.0 if nu is None else work.uncached / nu
    return model.c0 * iterations + model.c1 * work.uncached + model.c2 * work.attention_pairs + model.c3 * work.restored


def token_s(model: Coefficients) -> float:
    """Time to compute one more token, context left aside: what losing a cached token costs."""
    return model.c1 + (0.0 if model.uncached_per_iteration is None else model.c0 / model.uncached_per_iteration)


def decode_iteration_s(model: Coefficients, running: int) -> float:
    """T_D = d0 + d1*phi(B) + d2*B, phi(B) = 1 - (1 - k/E)^(t_fwd*B)."""
    phi = 1.0 - (1.0 - model.expert_share) ** (model.fed_tokens * running) if model.expert_share else 0.0
    return model.d0 + model.d1 * phi + model.d2 * running
