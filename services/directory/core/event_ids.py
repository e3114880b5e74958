"""Ids of the branch events that were applied last, so that a repeat is known as one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import takewhile


class EventIds:
    """The newest `most` ids, oldest first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[str] = set()
        self._order: deque[str] = deque()

    def __contains__(self, ident: str) -> bool:
        return ident in self._known

    def __iter__(self) -> Iterator[str]:
        return iter(self._order)

    def add(self, idents: Iterable[str]) -> None:
        """These are the newest now; those known before stay where they are."""
        for ident in idents:
            if ident not in self._known:
                self._known.add(ident)
                self._order.append(ident)
        while len(self._order) > self._most:
            self._known.discard(self._order.popleft())

    def after(self, ident: str | None) -> list[str]:
        """Those newer than this one; all if it is None or not known any more."""
        newer = list(takewhile(lambda each: each != ident, reversed(self._order)))
        return newer[::-1]
