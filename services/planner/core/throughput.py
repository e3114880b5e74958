"""Predicted throughput of splits, for all candidates and slices at once.

    Theta(P, D; w, q) = min( sum over P of mu_P,n , sum over D of mu_D,n )
    mu_P,n = 1 / T_req(n, w)          mu_D,n = B / ((t_out/t_acc) * T_D,n(B)),  B = q / |D|

Shapes: (c)andidates, (s)lices, (n)odes. A node of phase `both` gives each phase the share of its time that balances
them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from schemas.iteration_model import MEGA, IterationModel
from services.planner.core.demand import FEATURES
from services.planner.core.model_rows import Matrix
from services.planner.core.windows import Slice

UNKNOWN_ROOM = 1e6
"""Requests a node may decode at a time where it does not say."""


@dataclass(frozen=True, slots=True)
class NodeLimits:
    """What a node said it takes; 0 where it did not say."""

    batch_tokens: int = 0
    max_running: int = 0
    l1_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Works:
    """The usable slices as arrays of shape (s); `moments` is (s, features, features), `rate` requests per second."""

    t_uc: Matrix
    t_c: Matrix
    pairs: Matrix
    media: Matrix
    t_out: Matrix
    t_acc: Matrix
    q: Matrix
    moments: Matrix
    burstiness: Matrix
    agents: Matrix
    think_s: Matrix
    rate: Matrix

    @classmethod
    def of(cls, slices: Sequence[Slice], slice_s: float) -> "Works":
        """From slices that have a workload and a `q`."""
        known = [(s, s.workload, s.demand) for s in slices if s.workload is not None and s.demand is not None]
        columns = [
            (
                w.t_uc,
                w.t_c,
                w.attention_pairs,
                w.media,
                w.t_out,
                max(1e-9, w.t_acc),
                part.q or 0.0,
                demand.burstiness(),
                part.agents(slice_s),
                demand.think_s,
                demand.requests / slice_s,
            )
            for part, w, demand in known
        ]
        t_uc, t_c, pairs, media, t_out, t_acc, q, burst, agents, think, rate = np.array(columns, dtype=float).T
        moments = np.array([demand.each() for *_, demand in known])
        assert moments.shape[1:] == (FEATURES, FEATURES)
        return cls(t_uc, t_c, pairs, media, t_out, t_acc, q, moments, burst, agents, think, rate)

    @property
    def context(self) -> Matrix:
        """Mean KV a request reads while it decodes."""
        return self.t_uc + self.t_c + self.t_out / 2

    @property
    def iterations(self) -> Matrix:
        """Decode iterations of a request."""
        return np.maximum(1e-9, self.t_out / self.t_acc)


@dataclass(frozen=True, slots=True)
class NodeTimes:
    """Models and limits of nodes as arrays of shape (n)."""

    c: Matrix
    nu: Matrix
    rho: Matrix
    d: Matrix
    share: Matrix
    fed: Matrix
    batch: Matrix
    running: Matrix
    l1: Matrix

    @classmethod
    def of(cls, models: Sequence[IterationModel], limits: Sequence[NodeLimits]) -> "NodeTimes":
        """`c` is (n, 7): c0 to c5 and u0; `d` (n, 4). Unknown nu and limits are nan and 0."""
        return cls(
            np.array([(m.c0, m.c1, m.c2, m.c3, m.c4, m.c5, m.u0) for m in models], dtype=float),
            np.array([m.uncached_per_iteration or np.nan for m in models], dtype=float),
            np.array([1.0 if m.restored_share is None else m.restored_share for m in models]),
            np.array([(m.d0, m.d1, m.d2, m.d3) for m in models], dtype=float),
            np.array([m.expert_share for m in models]),
            np.array([m.fed_tokens for m in models]),
            np.array([limit.batch_tokens for limit in limits], dtype=float),
            np.array([limit.max_running for limit in limits], dtype=float),
            np.array([limit.l1_tokens for limit in limits], dtype=float),
        )

    def request_s(self, works: Works) -> Matrix:
        """T_req(n, w) = c0*t_uc/nu + c1*t_uc + c2*A + c3*rho*t_c + c4*media (+ c5 above u0), shape (n, s); nu of a node
        that ran none: t_uc."""
        nu = np.where(np.isnan(self.nu)[:, None], works.t_uc, self.nu[:, None])
        c0, c1, c2, c3, c4, c5, u0 = (column[:, None] for column in self.c.T)
        iterations = works.t_uc / np.maximum(nu, 1e-9)
        knee = c5 * np.maximum(0.0, nu - u0) * iterations
        restored = self.rho[:, None] * works.t_c
        tokens = c0 * iterations + c1 * works.t_uc + c2 * works.pairs + c3 * restored
        seconds: Matrix = tokens + c4 * works.media + knee
        return np.maximum(seconds, 1e-9)


def decode_s(d: Matrix, share: Matrix, fed: Matrix, running: Matrix, context: Matrix) -> Matrix:
    """T_D(B) for `running` requests of `context` tokens each; `d` has the coefficients last, all else broadcasts."""
    phi = 1.0 - np.power(1.0 - share, fed * running)
    seconds: Matrix = d[..., 0] + d[..., 1] * phi + d[..., 2] * running + d[..., 3] * running * context / MEGA
    return np.maximum(seconds, 1e-9)


def theta(times: NodeTimes, works: Works, prefill: Matrix, decode: Matrix) -> Matrix:
    """Requests per second of each candidate in each slice, (c, s).

    `prefill` and `decode` are (c, n) masks of 0 and 1; a node that is in both runs both phases.
    """
    mu_p = 1.0 / times.request_s(works)
    count = np.maximum(1.0, decode.sum(axis=1))
    running = works.q[None, :] / count[:, None]
    d, share, fed = times.d[None, None], times.share[None, None], times.fed[None, None]
    iteration_s = decode_s(d, share, fed, running[:, :, None], works.context[None, :, None])
    mu_d = running[:, :, None] / (works.iterations[None, :, None] * iteration_s)
    both = prefill * decode
    p, d_rate = (prefill - both) @ mu_p, np.einsum("cn,csn->cs", decode - both, mu_d)
    both_p, both_d = both @ mu_p, np.einsum("cn,csn->cs", both, mu_d)
    total = both_p + both_d
    to_prefill = np.clip((d_rate + both_d - p) / np.where(total > 0, total, 1.0), 0.0, 1.0)
    rates: Matrix = np.minimum(p + to_prefill * both_p, d_rate + (1.0 - to_prefill) * both_d)
    return rates
