"""The engine's side of its node's KV pool: fetch and pin, release, device memory, status, the mapped arena."""

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path

from structlog.typing import FilteringBoundLogger

from schemas.block_key import short_key
from schemas.kv import ChangeType, LocationChange, Tier
from schemas.pool import (
    AttachReply,
    AttachRequest,
    DeviceChanges,
    Empty,
    FetchReply,
    FetchRequest,
    PoolSource,
    PoolStatus,
    ReleaseRequest,
)
from schemas.serve import FetchSource
from services.arena import ArenaError, ArenaReader
from services.engine.backend import BackendInfo
from services.engine.core.device_mirror import DeviceMirror
from services.engine.core.media_marks import MediaMarks
from services.local_call import DEVICE, FETCH, RELEASE, STATUS, LocalClient, PoolRefused, PoolUnavailable

FETCH_S = 30.0
_ANSWER_S = 2.0
_STATUS_S = 0.2
_CHANGES_AT_ONCE = 512
_AGAIN_S = 0.2


class NodePool:
    """One connection to the pool, made again whenever it is lost. Without it nothing is reused and nothing kept, but
    requests are served all the same."""

    def __init__(self, path: Path, log: FilteringBoundLogger) -> None:
        self.path = path
        self.incarnation = 0
        self.slots = 0
        self.reader: ArenaReader | None = None
        self._log = log
        self._client: LocalClient | None = None
        self._mirror = DeviceMirror()
        self.marks = MediaMarks()
        self._pending: list[LocationChange] = []
        self._status: PoolStatus | None = None
        self._changed = asyncio.Event()

    @property
    def attached(self) -> bool:
        return self._client is not None and self._client.attached is not None

    @property
    def client(self) -> LocalClient:
        """The connection; PoolUnavailable before `start`."""
        if self._client is None:
            raise PoolUnavailable(f"no pool at {self.path}: not started")
        return self._client

    def start(self, info: BackendInfo, tasks: asyncio.TaskGroup) -> None:
        """Connect as the engine of this node and stay connected. PoolRefused out of `tasks` on another layout."""
        attach = AttachRequest(
            role="engine",
            model=info.model,
            block_size=info.block_size,
            block_bytes=info.block_bytes,
            key_version=info.key_version,
        )
        self._client = LocalClient(self.path, attach, on_attached=self._on_attached, on_lost=self._on_lost)
        tasks.create_task(self._client.run(), name="pool connection")
        tasks.create_task(self._tell_changes(), name="device changes")

    async def fetch(self, fetch_id: str, digests: Sequence[bytes], sources: Iterable[FetchSource]) -> FetchReply:
        """Bring the leading run of these blocks here and pin it under `fetch_id`; no blocks if the pool cannot.

        What device memory holds of its beginning needs no copy in the pool.
        """
        request = FetchRequest(
            id=fetch_id,
            digests=b"".join(digests),
            sources=[PoolSource(node=source.node, first=source.first, last=source.last) for source in sources],
            deadline_s=FETCH_S,
            device_blocks=self._mirror.leading(map(short_key, digests)),
            media=self.marks.of(map(short_key, digests)),
        )
        try:
            return await self.client.call(FETCH, request, FETCH_S + _ANSWER_S)
        except (PoolUnavailable, PoolRefused) as error:
            self._log.info("fetch_failed", fetch=fetch_id, error=str(error))
            return FetchReply(blocks=0, reason=str(error))

    async def release(self, fetch_id: str) -> None:
        """End a fetch or a pin. One that cannot be told ends with the connection, or by its time in the pool."""
        try:
            await self.client.call(RELEASE, ReleaseRequest(id=fetch_id), _ANSWER_S)
        except (PoolUnavailable, PoolRefused) as error:
            self._log.info("release_failed", fetch=fetch_id, error=str(error))

    async def status(self) -> PoolStatus | None:
        """What the heartbeat says of host memory; the last one known when the pool takes longer than a heartbeat may,
        None without a pool."""
        try:
            self._status = await self.client.call(STATUS, Empty(), _STATUS_S)
        except (PoolUnavailable, PoolRefused):
            if not self.attached:
                self._status = None
        return self._status

    def device_changes(self, changes: Iterable[LocationChange]) -> None:
        """Device memory has changed: the pool is told, in order, and told everything again when it starts anew."""
        for change in changes:
            self._mirror.apply(change)
            if self.attached:
                self._pending.append(self.marks.marked(change))
        self._changed.set()

    async def _on_attached(self, reply: AttachReply) -> None:
        self.incarnation, self.slots = reply.incarnation, reply.slots
        try:
            self.reader = ArenaReader(Path(reply.arena), writable=True)
        except (ArenaError, OSError) as error:
            self._log.warning("arena_not_mapped", arena=reply.arena, error=str(error))
        self._pending = self._held()
        self._changed.set()
        self._log.info("pool_attached", incarnation=reply.incarnation, arena=reply.arena, slots=reply.slots)

    def _on_lost(self) -> None:
        self.reader = None
        self._log.warning("pool_lost", path=str(self.path))

    async def _tell_changes(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._pending and self.attached:
                part, self._pending = self._pending[:_CHANGES_AT_ONCE], self._pending[_CHANGES_AT_ONCE:]
                try:
                    await self.client.call(DEVICE, DeviceChanges(changes=part), _ANSWER_S)
                except PoolUnavailable as error:
                    self._log.warning("device_changes_lost", changes=len(part), error=str(error))
                    await asyncio.sleep(_AGAIN_S)
                    self._pending = [LocationChange(type=ChangeType.CLEARED, tier=Tier.L1), *self._held()]

    def _held(self) -> list[LocationChange]:
        """All of device memory."""
        return [self.marks.marked(change) for change in self._mirror.snapshot()]
