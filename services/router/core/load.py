"""What this router has outstanding at every node. Entries belong to open requests, so nothing can be left behind."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.phase import Phase

_SMOOTHING = 0.05
Floats = npt.NDArray[np.float64]


class Booking(msgspec.Struct, frozen=True):
    """One open leg at a node: predicted seconds of its prefill, or tokens of KV its decode may need.

    `started`: when its prefill began (monotonic seconds), None while it waits; `placed`: when it was sent.
    """

    phase: Phase
    node: str
    service_s: float = 0.0
    tokens: int = 0
    started: float | None = None
    placed: float = 0.0


@dataclass(slots=True)
class _Node:
    """`waiting`: (predicted seconds, when sent) of each prefill that has not begun; `running`: (predicted seconds, when
    begun) of the others."""

    prefill: dict[str, Booking]
    decode: dict[str, Booking]
    foreign_prefill: int = 0
    foreign_decode: int = 0
    decode_tokens: int = 0
    waiting: dict[str, tuple[float, float]] = field(default_factory=dict)
    running: dict[str, tuple[float, float]] = field(default_factory=dict)


class Ledger:
    """Load per node: our own bookings, exactly; other routers' requests as the last heartbeat counted them.

    Nodes take waiting prefills in the order of arrival + `order_weight` * predicted time.
    """

    def __init__(self, mean_output_tokens: float = 256.0, order_weight: float = 0.0) -> None:
        self.order_weight = order_weight
        self._nodes: dict[str, _Node] = {}
        self._requests: dict[str, tuple[Booking, ...]] = {}
        self._mean_service_s = 0.0
        self.mean_output_tokens = mean_output_tokens

    def set(self, request: str, bookings: Iterable[Booking]) -> None:
        """Replace everything `request` has booked; an empty list frees it."""
        for booking in self._requests.pop(request, ()):
            self._side(booking).pop(request)
            self._count(request, booking, sign=-1)
        kept = tuple(bookings)
        if not kept:
            return
        self._requests[request] = kept
        for booking in kept:
            if request in self._side(booking):
                raise ValueError(f"request {request} has two {booking.phase} legs on {booking.node}")
            self._side(booking)[request] = booking
            self._count(request, booking, sign=1)

    def served(self, service_s: float, output_tokens: int) -> None:
        """Learn from a request that ended: the means stand for requests of other routers and unknown lengths."""
        self._mean_service_s += _SMOOTHING * (service_s - self._mean_service_s)
        self.mean_output_tokens += _SMOOTHING * (output_tokens - self.mean_output_tokens)

    def heartbeat(self, node: str, legs: int, decoding: int, *, shared: bool) -> None:
        """Legs the node reports in all, and how many of them decode; what exceeds ours belongs to other routers, if
        there are any (`shared`)."""
        entry = self._node(node)
        foreign = max(0, legs - self.open_legs(node)) if shared else 0
        entry.foreign_decode = min(foreign, decoding)
        entry.foreign_prefill = foreign - entry.foreign_decode

    def wait(self, node: str, now: float) -> tuple[float, float]:
        """(T_rem, queue) in seconds: rest of the running batch, and the predicted times of all that waits."""
        entry = self._nodes.get(node)
        if entry is None:
            return 0.0, 0.0
        queue = entry.foreign_prefill * self._mean_service_s
        running, since = 0.0, now
        for booking in entry.prefill.values():
            if booking.started is None:
                queue += booking.service_s
            else:
                running += booking.service_s
                since = min(since, booking.started)
        return max(0.0, running - (now - since)), queue

    def waits(self, index: Mapping[str, int], service_s: Floats, now: float) -> tuple[Floats, Floats]:
        """`wait` for all nodes of `index` at once, as a request of `service_s` seconds (per node) would find it: those
        that will go before it count, those it overtakes do not."""
        remaining, queue = [0.0] * len(index), [0.0] * len(index)
        weight, service = self.order_weight, service_s.tolist()
        for name, entry in self._nodes.items():
            if not (entry.prefill or entry.foreign_prefill) or (row := index.get(name)) is None:
                continue
            ahead, running, since = entry.foreign_prefill * self._mean_service_s, 0.0, now
            key = now + weight * service[row]
            for seconds, started in entry.running.values():
                running += seconds
                since = min(since, started)
            for seconds, placed in entry.waiting.values():
                if not weight or placed + weight * seconds <= key:
                    ahead += seconds
            remaining[row], queue[row] = max(0.0, running - (now - since)), ahead
        return np.array(remaining), np.array(queue)

    def decodes(self, index: Mapping[str, int]) -> tuple[Floats, Floats]:
        """`decoding` for all nodes of `index` at once."""
        running, tokens = [0] * len(index), [0] * len(index)
        for name, entry in self._nodes.items():
            if (entry.decode or entry.foreign_decode) and (row := index.get(name)) is not None:
                running[row], tokens[row] = len(entry.decode) + entry.foreign_decode, entry.decode_tokens
        return np.array(running, float), np.array(tokens, float)

    def decoding(self, node: str) -> tuple[int, int]:
        """(requests placed to decode at the node, tokens promised to ours)."""
        entry = self._nodes.get(node)
        if entry is None:
            return 0, 0
        return len(entry.decode) + entry.foreign_decode, entry.decode_tokens

    def booked(self) -> dict[str, tuple[Booking, ...]]:
        """All bookings by request."""
        return dict(self._requests)

    def open_legs(self, node: str) -> int:
        """Legs of ours at the node, both phases."""
        entry = self._nodes.get(node)
        return len(entry.prefill) + len(entry.decode) if entry else 0

    def check(self) -> None:
        """Every booking stands at exactly its node, and nothing else does."""
        booked = [(request, booking) for request, bookings in self._requests.items() for booking in bookings]
        assert all(self._side(booking).get(request) is booking for request, booking in booked)
        assert len(booked) == sum(self.open_legs(node) for node in self._nodes)
        for entry in self._nodes.values():
            assert entry.foreign_prefill >= 0 <= entry.foreign_decode
            assert entry.waiting.keys() | entry.running.keys() == entry.prefill.keys()
            assert entry.decode_tokens == sum(booking.tokens for booking in entry.decode.values())

    def _count(self, request: str, booking: Booking, sign: int) -> None:
        """Keep what placements read in step with a booking that came (1) or went (-1)."""
        entry = self._node(booking.node)
        if booking.phase is Phase.DECODE:
            entry.decode_tokens += sign * booking.tokens
            return
        side = entry.waiting if booking.started is None else entry.running
        if sign > 0:
            side[request] = booking.service_s, booking.placed if booking.started is None else booking.started
        else:
            del side[request]

    def _node(self, node: str) -> _Node:
        entry = self._nodes.get(node)
        if entry is None:
            entry = self._nodes[node] = _Node({}, {})
        return entry

    def _side(self, booking: Booking) -> dict[str, Booking]:
        node = self._node(booking.node)
        return node.prefill if booking.phase is Phase.PREFILL else node.decode
