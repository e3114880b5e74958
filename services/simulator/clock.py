"""Virtual time: a heap of what will happen, in order of time and then of planning."""

import heapq
from collections.abc import Callable


class Agenda:
    """Runs planned calls in order; each is given the time it was planned for. Nothing happens before `now`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.done = 0
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._planned = 0

    def at(self, time: float, what: Callable[[float], None]) -> None:
        """Plan `what` for `time`, at once if that has passed."""
        self._planned += 1
        heapq.heappush(self._heap, (max(time, self.now), self._planned, what))

    def run(self, until: float) -> None:
        """Do all that is due up to and including `until`; time stands there afterwards."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, what = heapq.heappop(heap)
            self.done += 1
            what(self.now)
        self.now = until
