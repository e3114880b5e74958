"""Prefixes that are being computed: a later request with the same cold prefix can wait for them."""

from __future__ import annotations

from collections import OrderedDict

from services.directory.core.run import Keys

INDEXED_BLOCKS = 4096
"""Unknown blocks of one prompt that others are compared with: enough for 256 K tokens in blocks of 64."""


class Pending:
    """One request between its match and its end. `keys` are its blocks from number `start` on, unknown at the match.

    `followers`: later requests with some of the same keys.
    """

    __slots__ = ("expires", "followers", "keys", "node", "request", "start")

    def __init__(self, request: str, start: int, keys: list[int], expires: float) -> None:
        self.request = request
        self.start = start
        self.keys = keys
        self.expires = expires
        self.node: str | None = None
        self.followers: list[Pending] = []


class PendingPrefixes:
    """By request id, oldest first. An unknown key names the first request that computes it.

    `lease_s`: a request that is neither answered nor released is forgotten after this time.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._requests: OrderedDict[str, Pending] = OrderedDict()
        self._first: dict[int, Pending] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, request: str) -> Pending | None:
        return self._requests.get(request)

    def add(self, request: str, start: int, keys: Keys, now: float) -> None:
        """Register a prompt whose blocks from `start` on are unknown; asked again, it keeps its node."""
        former = self.release(request)
        pending = Pending(request, start, keys[start : start + INDEXED_BLOCKS].tolist(), now + self._lease_s)
        pending.node = former.node if former is not None else None
        self._requests[request] = pending
        self._index(pending)

    def ahead(self, known: int, keys: Keys, request: str) -> tuple[int, Pending] | None:
        """The first other request that computes block number `known` of `keys`, and how many leading blocks of `keys`
        will be there when it has; None if there is none."""
        pending = self._first.get(keys[known]) if known < len(keys) else None
        if pending is None or pending.request == request:
            return None
        return known + _common(pending.keys, known - pending.start, keys, known), pending

    def release(self, request: str) -> Pending | None:
        """The request was answered, failed or was cancelled."""
        pending = self._requests.pop(request, None)
        if pending is not None:
            for key in pending.keys:
                if self._first[key] is pending:
                    del self._first[key]
            for follower in pending.followers:
                if self._requests.get(follower.request) is follower:
                    self._index(follower)
        return pending

    def _index(self, pending: Pending) -> None:
        first = self._first
        first.update(dict.fromkeys([key for key in pending.keys if key not in first], pending))
        for owner in {first[key] for key in pending.keys} - {pending}:
            owner.followers.append(pending)

    def expire(self, now: float) -> int:
        """Forget requests whose lease is over; how many."""
        expired = 0
        while self._requests and next(iter(self._requests.values())).expires <= now:
            self.release(next(iter(self._requests)))
            expired += 1
        return expired

    def check(self) -> None:
        assert set(self._first) == {key for pending in self._requests.values() for key in pending.keys}
        assert all(self._requests[pending.request] is pending for pending in self._first.values())


def _common(mine: list[int], at: int, keys: Keys, done: int) -> int:
    """How many keys agree from mine[at] and keys[done] on; the first does, and keys are chained."""
    low, high = 1, min(len(mine) - at, len(keys) - done)
    while low < high:
        middle = (low + high + 1) // 2
        if mine[at + middle - 1] == keys[done + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
