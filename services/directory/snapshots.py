"""Pulling what nodes hold, part by part, a few nodes at a time."""

import asyncio
from collections.abc import Callable

from schemas.codec import RejectedMessage, encode
from schemas.kv import SNAPSHOT_PART, SnapshotPart, SnapshotRequest
from schemas.subjects import Subjects
from services.bus import Bus, BusError
from services.directory.metrics import DirectoryMetrics
from services.observe import RateLimitedLog


class Snapshots:
    """One pull per node; a new one replaces one under way. `loaded` takes each part, `failed` a node that gave none.

    At most `at_once` nodes are pulled at the same time; the others wait their turn.
    """

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        tasks: asyncio.TaskGroup,
        metrics: DirectoryMetrics,
        log: RateLimitedLog,
        *,
        at_once: int,
        timeout_s: float,
        loaded: Callable[[SnapshotPart], None],
        failed: Callable[[str], None],
    ) -> None:
        self._bus, self._subjects, self._tasks = bus, subjects, tasks
        self._metrics, self._log = metrics, log
        self._timeout_s, self._loaded, self._failed = timeout_s, loaded, failed
        self._room = asyncio.Semaphore(at_once)
        self._pulls: dict[str, asyncio.Task[None]] = {}

    def pull(self, node: str, reason: str) -> None:
        """Ask a node for everything it holds."""
        former = self._pulls.pop(node, None)
        if former is not None:
            former.cancel()
        self._log.warning("snapshot", kind=node, node=node, reason=reason)
        pull = self._pulls[node] = self._tasks.create_task(self._pull(node), name=f"snapshot {node}")
        pull.add_done_callback(lambda task: self._ended(node, task))

    def _ended(self, node: str, task: asyncio.Task[None]) -> None:
        if self._pulls.get(node) is task:
            del self._pulls[node]

    async def _pull(self, node: str) -> None:
        try:
            async with self._room:
                await self._parts(node)
        except (BusError, RejectedMessage) as error:
            self._metrics.snapshots.labels("failed").inc()
            self._log.warning("snapshot_failed", kind=node, node=node, error=str(error))
            self._failed(node)
        else:
            self._metrics.snapshots.labels("complete").inc()

    async def _parts(self, node: str) -> None:
        """Parts of one snapshot; a pool that no longer has it begins a new one, which then replaces it."""
        request = SnapshotRequest()
        while True:
            data = await self._bus.request(self._subjects.kv_snapshot(node), encode(request), self._timeout_s)
            part = SNAPSHOT_PART.decode(data)
            if part.node != node:
                raise RejectedMessage("schema", f"snapshot of {node} says it is of {part.node}")
            self._loaded(part)
            if part.next_cursor is None:
                return
            request = SnapshotRequest(cursor=part.next_cursor, snapshot=part.snapshot)
