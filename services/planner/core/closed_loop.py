"""What a split would do with the agents there are: the fixed point X = N / (Z + R_P(X) + R_D(X)), and its latencies.

q as measured depends on the split under which it was measured; N agents and their pauses Z do not. R_P is the wait in
an M/G/P queue (Sakasegawa's approximation, with the measured burstiness of arrivals and the spread of prefill times)
plus the request's own iteration; R_D is t_out/t_acc iterations at B running requests. The unknown is B: D nodes at B
answer X_D(B) requests a second, and N - X*(Z + R_P(X)) - |D|*B falls with B. Ours; the reference has no such step.
"""

from dataclasses import dataclass

import numpy as np

from services.planner.core.demand import FEATURES
from services.planner.core.model_rows import Matrix
from services.planner.core.throughput import UNKNOWN_ROOM, NodeTimes, Works, decode_s

_STEPS = 40
_Z95 = 1.6449
_NEARLY = 1.0 - 1e-6


@dataclass(frozen=True, slots=True)
class Outlook:
    """Predicted for each candidate in each slice, (c, s): requests per second, TTFT, time per output token, requests in
    decode per node, and the utilisation of its prefill nodes."""

    rate: Matrix
    ttft_s: Matrix
    ttft_p95_s: Matrix
    tpot_s: Matrix
    running: Matrix
    prefill_load: Matrix
    room: Matrix


@dataclass(frozen=True, slots=True)
class _Prefill:
    """The prefill half of each candidate, (c, s): a request's time when batches are full, its own time in an empty
    node, their spread, and what batches share."""

    nodes: Matrix
    capacity: Matrix
    full_s: Matrix
    marginal_s: Matrix
    c0: Matrix
    most: Matrix
    spread: Matrix
    burstiness: Matrix

    def wait_s(self, rate: Matrix) -> tuple[Matrix, Matrix]:
        """(mean wait, probability of waiting) at `rate`."""
        load = np.minimum(rate / self.capacity, _NEARLY)
        busy = np.power(load, np.sqrt(2.0 * (self.nodes + 1.0)) - 1.0)
        wait: Matrix = (self.burstiness + self.spread) / 2.0 * busy / (self.nodes * (1.0 - load)) * self.full_s
        return wait, busy

    def own_s(self, rate: Matrix) -> Matrix:
        """A request's own iterations, its batch included: b requests come while a batch of b runs."""
        each = rate / self.nodes
        mates = each * self.c0 / np.maximum(1e-9, 1.0 - each * self.marginal_s)
        batch = np.clip(mates, 1.0, np.maximum(1.0, self.most))
        return self.c0 * np.maximum(1.0, 1.0 / self.most) + batch * self.marginal_s


def _prefill(times: NodeTimes, works: Works, mask: Matrix) -> _Prefill:
    nodes = np.maximum(1.0, mask.sum(axis=1))[:, None]
    batch = np.where(times.batch > 0, times.batch, np.nan)
    batch = np.where(np.isnan(batch), np.where(np.isnan(times.nu), 0.0, times.nu), batch)[:, None]
    batch = np.where(batch > 0, batch, works.t_uc[None, :])
    c0, c1, c2, c3, c4, c5, u0 = (column[:, None] for column in times.c.T)
    knee = c5 * np.maximum(0.0, 1.0 - u0 / np.maximum(batch, works.t_uc)) * works.t_uc
    marginal = c1 * works.t_uc + c2 * works.pairs + c3 * times.rho[:, None] * works.t_c + c4 * works.media + knee
    full = np.maximum(c0 * works.t_uc / batch + marginal, 1e-9)
    capacity = mask @ (1.0 / full)
    weights = times.c[:, :FEATURES].copy()
    weights[:, 3] *= times.rho
    mean = mask @ weights / nodes
    square = np.einsum("cf,sfg,cg->cs", mean, works.moments, mean)
    first = np.einsum("cf,sf->cs", mean, works.moments[:, 0, :])
    spread = np.maximum(0.0, square / np.maximum(first, 1e-12) ** 2 - 1.0)
    return _Prefill(
        nodes,
        np.maximum(capacity, 1e-12),
        nodes / np.maximum(capacity, 1e-12),
        mask @ marginal / nodes,
        np.broadcast_to(mask @ c0 / nodes, capacity.shape),
        np.maximum(mask @ (batch / np.maximum(works.t_uc, 1.0)) / nodes, 1e-9),
        spread,
        np.broadcast_to(works.burstiness, capacity.shape),
    )


def solve(times: NodeTimes, works: Works, prefill: Matrix, decode: Matrix) -> Outlook:
    """The fixed point of every candidate, (c, n) masks without nodes that run both, for every slice."""
    half = _prefill(times, works, prefill)
    count = np.maximum(1.0, decode.sum(axis=1))[:, None]
    d = (decode @ times.d / count)[:, None, :]
    share, fed = decode @ times.share[:, None] / count, decode @ times.fed[:, None] / count
    room = _room(times, works, decode) / count

    def rate_at(running: Matrix) -> Matrix:
        seconds = works.iterations * decode_s(d, share, fed, running, works.context)
        rates: Matrix = count * running / seconds
        return rates

    def left(running: Matrix) -> Matrix:
        rate = rate_at(running)
        spent = rate * (works.think_s + half.wait_s(rate)[0] + half.own_s(rate)) + count * running
        return np.where(rate < half.capacity * _NEARLY, works.agents - spent, -1.0)

    low, high = np.zeros_like(room), room.copy()
    for _ in range(_STEPS):
        middle = (low + high) / 2.0
        more = left(middle) > 0.0
        low, high = np.where(more, middle, low), np.where(more, high, middle)
    full = left(room) > 0.0
    running = np.where(full, room, low)
    rate = np.maximum(rate_at(running), 1e-12)
    wait, busy = half.wait_s(rate)
    own = half.own_s(rate)
    stuck = np.where(full, left(room) / rate, 0.0)
    iteration_s = decode_s(d, share, fed, running, works.context)
    mean = wait + stuck + own
    variance = _variance(half, works, rate, wait, busy) + own**2 * half.spread
    load = rate / half.capacity
    return Outlook(rate, mean, _p95(mean, variance), iteration_s / works.t_acc, running, load, room)


def _room(times: NodeTimes, works: Works, decode: Matrix) -> Matrix:
    """Requests that all decode nodes of a candidate hold together, (c, s)."""
    by_memory = times.l1[:, None] / np.maximum(1.0, works.t_uc + works.t_c + works.t_out)
    by_memory = np.where(times.l1[:, None] > 0, np.maximum(1.0, by_memory), UNKNOWN_ROOM)
    by_limit = np.where(times.running > 0, times.running, UNKNOWN_ROOM)[:, None]
    room: Matrix = decode @ np.minimum(by_memory, by_limit)
    return np.maximum(room, 1e-9)


def _variance(half: _Prefill, works: Works, rate: Matrix, wait: Matrix, busy: Matrix) -> Matrix:
    """Of the wait: exponential while it is had by chance, and bounded by how much a queue of few agents can vary."""
    by_chance = wait**2 * (2.0 / np.maximum(busy, 1e-6) - 1.0)
    queued = rate * wait
    others = np.maximum(0.0, works.agents - queued)
    by_count = (queued * half.spread + others * np.maximum(1.0, half.burstiness)) * (half.full_s / half.nodes) ** 2
    variance: Matrix = np.minimum(by_chance, np.maximum(by_count, 1e-12))
    return variance


def _p95(mean: Matrix, variance: Matrix) -> Matrix:
    """The 95th percentile of a gamma distribution (Wilson and Hilferty)."""
    k = np.maximum(mean, 1e-12) ** 2 / np.maximum(variance, 1e-18)
    root = 1.0 - 1.0 / (9.0 * k) + _Z95 / (3.0 * np.sqrt(k))
    value: Matrix = np.maximum(mean, mean * np.maximum(root, 0.0) ** 3)
    return value
