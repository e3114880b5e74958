"""What the requests of a slice asked for: means, second moments, pauses, bursts."""

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from schemas.phase import Workload
from schemas.telemetry import RequestTelemetry
from services.planner.core.starts import Starts, Vector

FEATURES = 5
"""Of a request: 1, t_uc, A, t_c and media, in this order."""
_COMPUTED = (1, 2, 4)
"""Features that prefill iterations tell of: t_uc, A and media."""
_OPENS = ("opens", "fork", "subagent")
"""Lineages of a branch's first request: it comes at once, from an agent that begins or is under way."""


def attention_pairs(t_uc: float, t_c: float) -> float:
    """Query-key pairs of a prefill: t_uc*t_c + t_uc*(t_uc+1)/2."""
    return t_uc * t_c + t_uc * (t_uc + 1) / 2


@dataclass(slots=True)
class Demand:
    """Sums over requests that were served. `moments` is the sum of f*f^T over their features f
    (1, t_uc, A, t_c, media).

    `paused` counts requests whose pause is known, `pause_s` sums the pauses. `starts`: what began meanwhile.
    `arrivals`: requests by the second of their arrival.
    """

    requests: int = 0
    moments: Vector = field(default_factory=lambda: np.zeros((FEATURES, FEATURES)))
    t_out: int = 0
    decode_steps: int = 0
    accepted: int = 0
    paused: int = 0
    pause_s: float = 0.0
    arrivals: Counter[int] = field(default_factory=Counter)
    starts: Starts = field(default_factory=Starts)

    def add(self, record: RequestTelemetry, pause_s: float | None) -> None:
        """A request that was served; `pause_s` None where nothing is known of what its branch did before."""
        t_uc, t_c = float(record.uncached_tokens), float(record.cached_tokens)
        features = np.array((1.0, t_uc, attention_pairs(t_uc, t_c), t_c, float(record.media)))
        self.moments += features[:, None] * features
        self.requests += 1
        self.t_out += record.output_tokens
        self.starts.end(record.output_tokens)
        self.arrivals[math.floor(record.t_arrive)] += 1
        if pause_s is not None:
            self.paused += 1
            self.pause_s += pause_s

    def plus(self, other: "Demand") -> "Demand":
        """Both together."""
        return Demand(
            self.requests + other.requests,
            self.moments + other.moments,
            self.t_out + other.t_out,
            self.decode_steps + other.decode_steps,
            self.accepted + other.accepted,
            self.paused + other.paused,
            self.pause_s + other.pause_s,
            self.arrivals + other.arrivals,
            self.starts.plus(other.starts),
        )

    def each(self) -> Vector:
        """`moments` per request: spread as among those that ended; what is computed for one on average as among those
        that began, where that is known."""
        each: Vector = self.moments / self.requests
        if not self.starts.known:
            return each
        for feature, mean in zip(_COMPUTED, self.starts.means(), strict=True):
            if each[0, feature] > 0:
                ratio = mean / each[0, feature]
                each[feature] *= ratio
                each[:, feature] *= ratio
            else:
                each[feature] = each[:, feature] = mean * each[0]
                each[feature, feature] = mean * mean
        return each

    def workload(self) -> Workload | None:
        """Per request; `t_acc` is per request and decode iteration, 1 where nothing was decoded."""
        if self.requests == 0:
            return None
        _, t_uc, pairs, t_c, media = (float(value) for value in self.each()[0])
        t_acc = self.accepted / self.decode_steps if self.decode_steps else 1.0
        t_out = self.starts.output_tokens() if self.starts.known else self.t_out / self.requests
        return Workload(t_uc=t_uc, t_c=t_c, attention_pairs=pairs, t_out=t_out, t_acc=t_acc, media=media)

    @property
    def think_s(self) -> float:
        """Mean pause before a request."""
        return self.pause_s / self.paused if self.paused else 0.0

    def burstiness(self) -> float:
        """Variance over mean of the arrivals per second, 1 for a Poisson process and where too little is known."""
        if self.requests < 20 or len(self.arrivals) < 2:
            return 1.0
        seconds = max(self.arrivals) - min(self.arrivals) + 1
        mean = self.requests / seconds
        square = sum(count * count for count in self.arrivals.values()) / seconds
        return min(10.0, max(0.2, (square - mean * mean) / mean))

    def check(self) -> None:
        assert min(self.requests, self.t_out, self.decode_steps, self.accepted, self.paused) >= 0
        assert self.paused <= self.requests == round(float(self.moments[0, 0]))
        assert self.pause_s >= 0.0
        self.starts.check()


class Pauses:
    """When each branch was last answered, by the sender's clock; those silent for `keep_s` are forgotten."""

    def __init__(self, keep_s: float = 1800.0) -> None:
        self._keep_s = keep_s
        self._ended: dict[str, float] = {}
        self._swept = float("-inf")

    def pause_s(self, record: RequestTelemetry) -> float | None:
        """The pause before this request, 0 for one that opens its branch; remembers its end."""
        if record.branch is None:
            return None
        before = self._ended.get(record.branch)
        self._ended[record.branch] = max(record.t_end, before or record.t_end)
        if record.t_end - self._swept > self._keep_s / 10:
            self._swept = record.t_end
            self._ended = {name: end for name, end in self._ended.items() if record.t_end - end < self._keep_s}
        if before is None:
            return 0.0 if record.lineage in _OPENS else None
        pause_s = record.t_arrive - before
        return max(0.0, pause_s) if pause_s <= self._keep_s else None
