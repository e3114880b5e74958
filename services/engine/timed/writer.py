"""Write-through: full blocks go to host memory in the order in which they became full."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from services.engine.timed.state import TimedLeg
from services.engine.timed.store import BlockStore


class Writer:
    """One queue of blocks, written one run after the other. `done` is told when a run of a leg has been written."""

    def __init__(self, store: BlockStore, done: Callable[[TimedLeg], None]) -> None:
        self._store, self._done = store, done
        self._queue: deque[tuple[TimedLeg, Sequence[bytes], bytes]] = deque()
        self._wake = asyncio.Event()

    def write(self, leg: TimedLeg, first: int, last: int) -> None:
        """Blocks [first, last) of the leg's context."""
        if first >= last:
            return
        digests = leg.context.digests
        parent = digests[first - 1] if first else b""
        leg.writes += 1
        self._queue.append((leg, digests[first:last], parent))
        self._wake.set()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                leg, digests, parent = self._queue.popleft()
                await self._store.write(digests, parent)
                leg.writes -= 1
                self._done(leg)
