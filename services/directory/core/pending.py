"""Prefixes that are being computed: a later request with the same cold prefix can wait for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from services.directory.core.run import Keys

STRIDE = 16
"""Every so many blocks a key is indexed. Keys are chained, so that a common key proves all blocks before it."""
ENDED_KEPT = 10_000
"""So many requests are remembered that ended before they were asked about."""
FOLLOWERS_LOOKED_AT = 64
"""Where the first request with an indexed key goes another way within the stride, so many others with it are asked."""
_NONE: Keys = memoryview(b"").cast("Q")


class Pending:
    """One request between its match and its end. `keys` are those of its prompt from number `start` on, which lie
    nowhere yet.

    `followers`: later requests with some of the same keys. `rank`: how many came before it. `router`: who asked, ""
    where that is not known.
    """

    __slots__ = ("expires", "followers", "keys", "marks", "node", "rank", "request", "router", "start")

    def __init__(self, request: str, start: int, keys: Keys, expires: float, rank: int, router: str) -> None:
        self.request = request
        self.router = router
        self.rank = rank
        self.start = start
        self.keys = _NONE
        self.expires = expires
        self.marks: list[int] = []
        if start < len(keys):
            self.keys = memoryview(keys[start:].tobytes()).cast("Q")
            self.marks = keys[start : start + 1].tolist() + keys[start + STRIDE - start % STRIDE :: STRIDE].tolist()
        self.node: str | None = None
        self.followers: list[Pending] = []

    def goes_with(self, start: int, keys: Keys) -> bool:
        """Whether a prompt whose blocks from `start` on lie nowhere is this one."""
        first, last = self.start, self.start + len(self.keys)
        return first <= start and last == len(keys) and (first == last or self.keys[-1] == keys[-1])

    def computes(self, number: int, key: int) -> bool:
        """Whether block `number` of a context is one of this prompt's and lies nowhere yet."""
        at = number - self.start
        return 0 <= at < len(self.keys) and self.keys[at] == key


class PendingPrefixes:
    """By request id, oldest first. A marked key names the first request that computes it.

    `lease_s`: a request that is neither answered nor released is forgotten after this time. What ends a request comes
    another way than its question, and may come first.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._requests: OrderedDict[str, Pending] = OrderedDict()
        self._first: dict[int, Pending] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._ranks = 0

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, request: str) -> Pending | None:
        return self._requests.get(request)

    def requests(self, router: str | None = None) -> list[str]:
        """All of them, or those of one router."""
        return [request for request, pending in self._requests.items() if router in (None, pending.router)]

    def add(self, request: str, start: int, keys: Keys, now: float, router: str = "") -> bool:
        """Register a prompt whose blocks from `start` on lie nowhere; asked again, it keeps its rank and its node.
        False: it has ended already."""
        if request in self._ended:
            del self._ended[request]
            return False
        former = self._requests.get(request)
        if former is not None and former.goes_with(start, keys):
            former.expires = now + self._lease_s
            self._requests.move_to_end(request)
            return True
        self._ranks += 1
        pending = Pending(request, start, keys, now + self._lease_s, self._ranks, router)
        if former is not None:
            pending.node = former.node
            self.release(request)
        self._requests[request] = pending
        if pending.marks:
            self._index(pending)
        return True

    def ahead(self, known: int, keys: Keys, request: str) -> tuple[int, Pending] | None:
        """The first other request that computes block number `known` of `keys`, and how many leading blocks of `keys`
        will be there when it has; None if there is none."""
        first: Pending | None = None
        own = self._requests.get(request)
        rank = own.rank if own is not None else self._ranks + 1
        near = known - known % STRIDE
        for number in (*range(near, known + 1), near + STRIDE) if self._first else ():
            marked = self._first.get(keys[number]) if number < len(keys) else None
            if marked is None:
                continue
            alone = marked.computes(known, keys[known])
            for pending in (marked,) if alone else self._following(marked):
                if pending.rank < rank and pending.computes(known, keys[known]):
                    first, rank = pending, pending.rank
        return None if first is None else (_common(first, keys, known + 1), first)

    def _following(self, marked: Pending) -> Iterator[Pending]:
        for follower in marked.followers[:FOLLOWERS_LOOKED_AT]:
            if self._requests.get(follower.request) is follower:
                yield follower

    def end(self, request: str) -> None:
        """The request was answered, failed or was cancelled. It is not pending any more, nor if it is added later."""
        if self.release(request) is None:
            self._ended[request] = None
            if len(self._ended) > ENDED_KEPT:
                self._ended.popitem(last=False)

    def release(self, request: str) -> Pending | None:
        """Forget a request; it may be added again."""
        pending = self._requests.pop(request, None)
        if pending is not None:
            for key in pending.marks:
                if self._first[key] is pending:
                    del self._first[key]
            for follower in sorted(pending.followers, key=_rank):
                if self._requests.get(follower.request) is follower:
                    self._index(follower)
        return pending

    def _index(self, pending: Pending) -> None:
        first = self._first
        first.update(dict.fromkeys([key for key in pending.marks if key not in first], pending))
        for owner in {first[key] for key in pending.marks} - {pending}:
            owner.followers.append(pending)

    def expire(self, now: float) -> int:
        """Forget requests whose lease is over; how many."""
        expired = 0
        while self._requests and next(iter(self._requests.values())).expires <= now:
            self.release(next(iter(self._requests)))
            expired += 1
        return expired

    def check(self) -> None:
        assert set(self._first) == {key for pending in self._requests.values() for key in pending.marks}
        assert all(self._requests[pending.request] is pending for pending in self._first.values())
        assert not self._ended.keys() & self._requests.keys()


def _rank(pending: Pending) -> int:
    return pending.rank


def _common(pending: Pending, keys: Keys, low: int) -> int:
    """How many leading keys agree; at least `low` do, more than are known before `pending`, and keys are chained."""
    mine, start = pending.keys, pending.start
    high = min(start + len(mine), len(keys))
    while low < high:
        middle = (low + high + 1) // 2
        if mine[middle - 1 - start] == keys[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
