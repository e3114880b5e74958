"""How long an iteration takes: the two iteration-time models, a measured table in their place, and presets of both.

T_P = c0 + c1*sum(t_uc) + c2*sum(A) + c3*sum(t_rst) + c4*media,  A = t_uc*t_c + t_uc*(t_uc+1)/2 per request
T_D = d0 + d1*phi(B) + d2*B + d3*context/1e6,                    phi(B) = 1 - (1 - k/E)^(t_fwd*B)
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Protocol

import msgspec

MEGA = 1e6


def attention_pairs(uncached_tokens: int, cached_tokens: int) -> float:
    """Query-key pairs A of one request (or one chunk of it) in prefill."""
    return uncached_tokens * cached_tokens + uncached_tokens * (uncached_tokens + 1) / 2


class PrefillTerms(msgspec.Struct, frozen=True):
    """What the prefill model sees of one iteration, summed over its batch."""

    requests: int
    uncached_tokens: int
    attention_pairs: float
    restored_tokens: int = 0
    media: int = 0


class DecodeTerms(msgspec.Struct, frozen=True):
    """What the decode model sees: `requests` running, `context_tokens` the KV they read together."""

    requests: int
    context_tokens: int


class PrefillTime(Protocol):
    """How long a prefill iteration takes, in seconds."""

    def prefill_s(self, terms: PrefillTerms) -> float: ...


class IterationTime(PrefillTime, Protocol):
    """A model of all iterations of one node, in seconds."""

    def decode_s(self, terms: DecodeTerms) -> float: ...


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Both models in closed form. Seconds per: iteration (c0, d0, d1), token (c1, c3), pair (c2), picture (c4),
    request (d2), 1e6 context tokens (d3). `active_share` is k/E; 1 makes phi constant (dense models)."""

    c0: float = 0.0
    c1: float = 0.0
    c2: float = 0.0
    c3: float = 0.0
    c4: float = 0.0
    d0: float = 0.0
    d1: float = 0.0
    d2: float = 0.0
    d3: float = 0.0
    active_share: float = 1.0
    fed_tokens: float = 1.0

    def prefill_s(self, terms: PrefillTerms) -> float:
        return (
            self.c0
            + self.c1 * terms.uncached_tokens
            + self.c2 * terms.attention_pairs
            + self.c3 * terms.restored_tokens
            + self.c4 * terms.media
        )

    def decode_s(self, terms: DecodeTerms) -> float:
        return (
            self.d0
            + self.d1 * self.experts_touched(terms.requests)
            + self.d2 * terms.requests
            + self.d3 * terms.context_tokens / MEGA
        )

    def faster(self, speed: float) -> "Coefficients":
        """The same engine at `speed` times the pace."""
        names = ("c0", "c1", "c2", "c3", "c4", "d0", "d1", "d2", "d3")
        return replace(self, **{name: getattr(self, name) / speed for name in names})

    def experts_touched(self, requests: int) -> float:
        """phi(B): the share of routed experts that `requests` running requests touch in one iteration."""
        return 1.0 - float((1.0 - self.active_share) ** (self.fed_tokens * requests))


class _Grid:
    """Bilinear interpolation over a full grid of points; outside of it the edge's slope goes on (never below 0)."""

    def __init__(self, points: dict[tuple[float, float], float]) -> None:
        self.xs = sorted({x for x, _ in points})
        self.ys = sorted({y for _, y in points})
        missing = [(x, y) for x in self.xs for y in self.ys if (x, y) not in points]
        if missing or len(self.xs) < 2 or len(self.ys) < 2:
            raise ValueError(
                f"a table of {len(self.xs)} x {len(self.ys)} points lacks {missing[:3]}, wanted a full grid"
            )
        self._points = points

    def at(self, x: float, y: float) -> float:
        x0, x1 = self._around(self.xs, x)
        y0, y1 = self._around(self.ys, y)
        u, w = (x - x0) / (x1 - x0), (y - y0) / (y1 - y0)
        low = self._points[x0, y0] * (1 - u) + self._points[x1, y0] * u
        high = self._points[x0, y1] * (1 - u) + self._points[x1, y1] * u
        return max(0.0, low * (1 - w) + high * w)

    @staticmethod
    def _around(axis: Sequence[float], value: float) -> tuple[float, float]:
        right = min(max(bisect_right(axis, value), 1), len(axis) - 1)
        return axis[right - 1], axis[right]


class SiliconTable:
    """Iteration times looked up in a measured table instead of a formula.

    `ctx` rows [model, t_uc, t_c, batch, ms] of single requests; `gen` rows [model, drafts, B, context of each, ms].
    A batch of prefills is looked up as the one request with the same sums of t_uc and A. The tables count draft tokens
    as extra sequences, so the slope over context is taken from the rows without drafts.
    """

    def __init__(
        self, rows: dict[str, list[list[Any]]], model: str, *, drafts: int = 0, restore_s: float = 0.0
    ) -> None:
        prefill = {(float(r[1]), float(r[2])): r[4] / 1e3 for r in rows["ctx"] if r[0] == model and r[3] == 1}
        plain = {(float(r[2]), float(r[3])): r[4] / 1e3 for r in rows["gen"] if r[0] == model and r[1] == 0}
        drafted = {(float(r[2]), float(r[3])): r[4] / 1e3 for r in rows["gen"] if r[0] == model and r[1] == drafts}
        if not (prefill and plain and drafted):
            raise ValueError(f"the table has no rows of model {model!r} with {drafts} draft tokens")
        self._prefill, self._plain, self._drafted = _Grid(prefill), _Grid(plain), _Grid(drafted)
        self._restore_s = restore_s

    def prefill_s(self, terms: PrefillTerms) -> float:
        uncached = terms.uncached_tokens
        own_pairs = uncached * (uncached + 1) / 2
        cached = max(0.0, (terms.attention_pairs - own_pairs) / uncached) if uncached else 0.0
        return self._prefill.at(uncached, cached) + self._restore_s * terms.restored_tokens

    def decode_s(self, terms: DecodeTerms) -> float:
        each = terms.context_tokens / terms.requests if terms.requests else 0.0
        shortest = self._drafted.ys[0]
        base = self._drafted.at(terms.requests, shortest)
        return max(0.0, base + self._plain.at(terms.requests, each) - self._plain.at(terms.requests, shortest))


class ObservedPrefill:
    """Seconds per uncached token of an engine without a model, from its own iterations (exponential mean).

    Until the first iteration it answers with `first_guess_s`, so that a fetch is not given up for want of data.
    """

    def __init__(self, first_guess_s: float = 1e-3, weight: float = 0.2) -> None:
        self._token_s = first_guess_s
        self._weight = weight
        self._seen = False

    def observe(self, uncached_tokens: int, duration_s: float) -> None:
        """Take one prefill iteration into the mean; those without tokens say nothing."""
        if uncached_tokens <= 0:
            return
        token_s = duration_s / uncached_tokens
        self._token_s = token_s if not self._seen else self._token_s + self._weight * (token_s - self._token_s)
        self._seen = True

    def prefill_s(self, terms: PrefillTerms) -> float:
        return self._token_s * terms.uncached_tokens


@dataclass(frozen=True, slots=True)
class Preset:
    """A model's times and sizes. `accepted_tokens` and the coefficients' `fed_tokens` are t_acc and t_fwd; transfers
    between devices move `kv_bytes_per_token` at `link_bytes_per_s` (0: at once)."""

    times: Coefficients
    accepted_tokens: float = 1.0
    kv_bytes_per_token: int = 0
    link_bytes_per_s: float = 0.0
    l1_tokens: int = 0

    @property
    def experts(self) -> tuple[int, int]:
        """(k, E) up to a common factor, (0, 0) for a dense model."""
        share = Fraction(self.times.active_share).limit_denominator(4096)
        return (share.numerator, share.denominator) if 0 < share < 1 else (0, 0)

    def transfer_s(self, tokens: int) -> float:
        """How long the KV of `tokens` tokens travels from device to device."""
        return tokens * self.kv_bytes_per_token / self.link_bytes_per_s if self.link_bytes_per_s else 0.0


_GLM = Coefficients(
    c0=0.1, c1=3.4e-5, c2=2.35e-10, c3=2e-7, d0=0.006, d1=0.013, d2=0.0004, d3=0.001, active_share=8 / 256, fed_tokens=4
)
_KIMI = Coefficients(
    c0=0.03,
    c1=1.9e-5,
    c2=6e-10,
    c3=1.5e-7,
    d0=0.0057,
    d1=0.019,
    d2=0.00032,
    d3=0.0055,
    active_share=8 / 384,
    fed_tokens=4,
)
_GLM_SILICON = replace(_GLM, c0=0.0707, c1=2.353e-5, c2=1.604e-10, d0=0.0072, d1=0.0131, d2=0.000185, d3=0.00358)
_KIMI_SILICON = replace(_KIMI, c0=0.0296, c1=1.318e-5, c2=4.542e-10, d0=0.0058, d2=0.000105, d3=0.00794)
_LAPTOP = Coefficients(c0=0.004, c1=2e-5, c2=1e-10, c3=1e-6, d0=0.004, d1=0.002, d2=0.0002, d3=0.01)

PRESETS: dict[str, Preset] = {
    "zero": Preset(Coefficients()),
    "laptop": Preset(_LAPTOP, kv_bytes_per_token=4096, link_bytes_per_s=1e9, l1_tokens=65_536),
    "glm-5.2": Preset(_GLM, 2.5, 48_408, 1e11, 2_900_000),
    "kimi-k2.6": Preset(_KIMI, 2.5, 35_136, 1e11, 3_000_000),
    "glm-5.2-silicon": Preset(_GLM_SILICON, 2.5, 48_408, 1e11, 2_900_000),
    "kimi-k2.6-silicon": Preset(_KIMI_SILICON, 2.5, 35_136, 1e11, 3_000_000),
}
"""`zero`: no time at all. `laptop`: invented, small and quick. `*-silicon`: non-negative least squares over NVIDIA's
measured GB300 kernel tables (TP4, NVFP4 weights, FP8 KV; mean error 1-6 %). `glm-5.2`, `kimi-k2.6`: the same form
rescaled to the request times that the reference system reported (GLM: 0.661 s busy a request, 17 ms at 8 and 45 ms at
64 running; Kimi's prefill is the least certain). t_fwd 4 and t_acc 2.5, the link and c3 are modelled, not measured."""
