"""Telling the cluster what this node holds: location messages, the heartbeat, snapshots."""

import asyncio
from secrets import token_hex

from schemas.codec import RejectedMessage, encode
from schemas.kv import SNAPSHOT_REQUEST, KvLocation, SnapshotPart, SnapshotRequest
from schemas.subjects import Subjects
from services.bus import Bus, BusError, Delivery
from services.clock import Clock
from services.kvpool.core.snapshot import Snapshot
from services.kvpool.metrics import PoolMetrics
from services.kvpool.store import Store
from services.observe import RateLimitedLog

GATHER_S = 0.01
"""Changes wait this long for others to go with them; every change is on the bus within 20 ms."""
HEARTBEAT_S = 1.0
HEADROOM_BYTES = 1024
MAX_MESSAGE_BYTES = 1 << 20
PART_BLOCKS = 4096
"""Blocks of one snapshot part: what can be gathered in a few milliseconds."""
OPEN_SNAPSHOTS = 4
SNAPSHOT_IDLE_S = 30.0


class Publisher:
    """Publishes the location log in order, and answers snapshot requests as of a number everybody was told."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        node: str,
        store: Store,
        clock: Clock,
        metrics: PoolMetrics,
        log: RateLimitedLog,
    ) -> None:
        self._bus, self._node, self._store, self._clock = bus, node, store, clock
        self._subject, self._snapshot_subject = subjects.kv_location(node), subjects.kv_snapshot(node)
        self._metrics, self._log = metrics, log
        self._pending = asyncio.Event()
        self._order = asyncio.Lock()
        self._snapshots: dict[str, tuple[Snapshot, float]] = {}
        store.on_change(self._on_change)
        self._on_change()

    def _on_change(self) -> None:
        if self._store.core.log.pending:
            self._pending.set()

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Answer snapshot requests and publish, from now on."""
        await self._bus.respond(self._snapshot_subject, self._respond)
        tasks.create_task(self._publish_changes(), name="kv.location")
        tasks.create_task(self._heartbeats(), name="kv.location heartbeat")

    async def _publish_changes(self) -> None:
        while True:
            await self._pending.wait()
            await asyncio.sleep(GATHER_S)
            await self.flush()

    async def _heartbeats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self.heartbeat()

    async def heartbeat(self) -> None:
        """Repeat the last number, once everything up to it is out."""
        await self.flush()
        async with self._order:
            await self._publish(self._store.core.log.heartbeat())

    async def flush(self) -> None:
        """Publish all pending changes."""
        async with self._order:
            for message in self._take():
                await self._publish(message)

    def _take(self) -> list[KvLocation]:
        self._pending.clear()
        return self._store.core.log.take(self._limit_bytes)

    @property
    def _limit_bytes(self) -> int:
        return min(self._bus.max_payload_bytes, MAX_MESSAGE_BYTES) - HEADROOM_BYTES

    async def _publish(self, message: KvLocation) -> None:
        try:
            await self._bus.publish(self._subject, encode(message))
        except BusError as error:
            self._metrics.unpublished.inc()
            self._log.warning("location_not_published", seq=message.seq, error=str(error))

    async def _respond(self, request: Delivery) -> bytes:
        try:
            asked = SNAPSHOT_REQUEST.decode(request.data)
        except RejectedMessage as error:
            self._metrics.rejected.labels("kv.snapshot", error.reason).inc()
            self._log.warning("rejected_request", kind="snapshot", error=str(error))
            raise
        return encode(await self._part(asked))

    async def _part(self, asked: SnapshotRequest) -> SnapshotPart:
        """The asked part, or part 0 of a new snapshot: when none is named, or the named one is no more."""
        self._forget_idle()
        snapshot = self._snapshots.get(asked.snapshot or "", (None, 0.0))[0]
        part = snapshot.part(asked.cursor, PART_BLOCKS, self._limit_bytes) if snapshot is not None else None
        if snapshot is None or part is None:
            snapshot = await self._freeze()
            part = snapshot.part(0, PART_BLOCKS, self._limit_bytes)
            assert part is not None
        self._snapshots.pop(snapshot.id, None)
        self._snapshots[snapshot.id] = (snapshot, self._clock.now())
        return part

    def _forget_idle(self) -> None:
        before = self._clock.now() - SNAPSHOT_IDLE_S
        kept = [(id_, entry) for id_, entry in self._snapshots.items() if entry[1] > before]
        self._snapshots = dict(kept[-OPEN_SNAPSHOTS:])

    async def _freeze(self) -> Snapshot:
        async with self._order:
            messages = self._take()
            snapshot = self._store.core.freeze(token_hex(8))
            self._metrics.snapshots.inc()
            for message in messages:
                await self._publish(message)
        return snapshot
