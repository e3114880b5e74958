"""What this router has outstanding at every node. Entries belong to open requests, so nothing can be left behind."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from schemas.phase import Phase
from services.router.core.load_columns import Floats, NodeColumn, Numbers, Prefills

_SMOOTHING = 0.05


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
    """Bookings at one node by request, and its number in the columns."""

    number: int
    prefill: dict[str, Booking] = field(default_factory=dict)
    decode: dict[str, Booking] = field(default_factory=dict)


class Ledger:
    """Load per node: our own bookings, exactly; other routers' requests as the last heartbeat counted them.

    Nodes take waiting prefills in the order of arrival + `order_weight` * predicted time.
    """

    def __init__(self, mean_output_tokens: float = 256.0, order_weight: float = 0.0) -> None:
        self.order_weight = order_weight
        self._nodes: dict[str, _Node] = {}
        self._numbers = Numbers()
        self._waiting, self._running = Prefills(), Prefills()
        self._foreign_prefill, self._foreign_decode = NodeColumn(), NodeColumn()
        self._decoding, self._tokens = NodeColumn(), NodeColumn()
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
        decode = min(foreign, decoding)
        self._foreign_decode.set(entry.number, decode)
        self._foreign_prefill.set(entry.number, foreign - decode)

    def wait(self, node: str, now: float) -> tuple[float, float]:
        """(T_rem, queue) in seconds: rest of the running batch, and the predicted times of all that waits."""
        entry = self._nodes.get(node)
        if entry is None:
            return 0.0, 0.0
        queue = self._foreign_prefill[entry.number] * self._mean_service_s
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
        size, rows = len(index), self._numbers.rows(index)
        queue, running = np.zeros(size + 1), np.zeros(size + 1)
        queue[rows] = self._foreign_prefill.first(len(rows)) * self._mean_service_s
        if len(self._waiting):
            at, seconds = rows[self._waiting.node], self._waiting.seconds
            if self.order_weight:
                goes = self._waiting.at + self.order_weight * seconds
                seconds = seconds * (goes <= now + self.order_weight * service_s[np.minimum(at, size - 1)])
            queue += np.bincount(at, seconds, size + 1)
        if len(self._running):
            at, since = rows[self._running.node], np.full(size + 1, now)
            np.minimum.at(since, at, self._running.at)
            running = np.maximum(0.0, np.bincount(at, self._running.seconds, size + 1) - (now - since))
        return running[:size], queue[:size]

    def decodes(self, index: Mapping[str, int]) -> tuple[Floats, Floats]:
        """`decoding` for all nodes of `index` at once."""
        size, rows = len(index), self._numbers.rows(index)
        running, tokens = np.zeros(size + 1), np.zeros(size + 1)
        running[rows] = self._decoding.first(len(rows)) + self._foreign_decode.first(len(rows))
        tokens[rows] = self._tokens.first(len(rows))
        return running[:size], tokens[:size]

    def decoding(self, node: str) -> tuple[int, int]:
        """(requests placed to decode at the node, tokens promised to ours)."""
        entry = self._nodes.get(node)
        if entry is None:
            return 0, 0
        return len(entry.decode) + int(self._foreign_decode[entry.number]), int(self._tokens[entry.number])

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
        prefills = self._waiting.held() | self._running.held()
        assert prefills == {(id_, entry.number) for entry in self._nodes.values() for id_ in entry.prefill}
        assert len(prefills) == len(self._waiting) + len(self._running)
        for entry in self._nodes.values():
            number = entry.number
            assert self._foreign_prefill[number] >= 0 <= self._foreign_decode[number]
            assert self._decoding[number] == len(entry.decode)
            assert self._tokens[number] == sum(booking.tokens for booking in entry.decode.values())

    def _count(self, request: str, booking: Booking, sign: int) -> None:
        """Keep what placements read in step with a booking that came (1) or went (-1)."""
        entry = self._node(booking.node)
        if booking.phase is Phase.DECODE:
            self._tokens.add(entry.number, sign * booking.tokens)
            self._decoding.add(entry.number, sign)
            return
        side = self._waiting if booking.started is None else self._running
        if sign > 0:
            at = booking.placed if booking.started is None else booking.started
            side.put(request, entry.number, booking.service_s, at)
        else:
            side.drop(request, entry.number)

    def _node(self, node: str) -> _Node:
        found = self._nodes.get(node)
        if found is None:
            found = self._nodes[node] = _Node(self._numbers.of(node))
        return found

    def _side(self, booking: Booking) -> dict[str, Booking]:
        node = self._node(booking.node)
        return node.prefill if booking.phase is Phase.PREFILL else node.decode
