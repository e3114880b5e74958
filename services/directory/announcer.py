"""Telling pools about their copies: changes gather for a moment and go out in order, numbered per node."""

import asyncio

from schemas.codec import encode
from schemas.kv import KEY_BYTES, KvReference, ReferenceChange
from schemas.subjects import Subjects
from services.bus import Bus, BusError
from services.directory.core.effects import ReferencesChanged
from services.directory.metrics import DirectoryMetrics
from services.observe import RateLimitedLog

GATHER_S = 0.015
LARGEST_BYTES = 512 << 10


class Announcer:
    """Publishes `kv.reference`. A lost message leaves a gap in the numbers, and its pool asks for everything."""

    def __init__(
        self, bus: Bus, subjects: Subjects, incarnation: int, metrics: DirectoryMetrics, log: RateLimitedLog
    ) -> None:
        self._bus, self._subjects, self._incarnation = bus, subjects, incarnation
        self._metrics, self._log = metrics, log
        self._waiting: dict[str, list[ReferencesChanged]] = {}
        self._sequences: dict[str, int] = {}
        self._wake = asyncio.Event()

    def tell(self, change: ReferencesChanged) -> None:
        """Queue a change for its node; what was queued before everything is said anew is void."""
        waiting = self._waiting.setdefault(change.node, [])
        if change.full:
            waiting.clear()
        waiting.append(change)
        self._wake.set()

    async def run(self) -> None:
        """Publish what gathers, for as long as the service lives."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(GATHER_S)
            self._wake.clear()
            await self.flush()

    async def flush(self) -> None:
        """Publish what waits."""
        waiting, self._waiting = self._waiting, {}
        largest = min(LARGEST_BYTES, self._bus.max_payload_bytes // 2)
        for node, changes in waiting.items():
            for message in self._messages(node, changes, largest):
                try:
                    await self._bus.publish(self._subjects.kv_reference(node), encode(message))
                except BusError as error:
                    self._log.warning("references_not_told", kind=node, node=node, error=str(error))
                self._metrics.told.inc(sum(len(change.hashes) // KEY_BYTES for change in message.changes))

    def _messages(self, node: str, changes: list[ReferencesChanged], largest: int) -> list[KvReference]:
        full = changes[0].full
        parts: list[list[ReferenceChange]] = [[]]
        room = largest
        for change in _joined(changes):
            for start in range(0, len(change.hashes), largest):
                hashes = change.hashes[start : start + largest]
                if len(hashes) > room:
                    parts.append([])
                    room = largest
                parts[-1].append(
                    ReferenceChange(referenced=change.referenced, unreachable=change.unreachable, hashes=hashes)
                )
                room -= len(hashes)
        return [self._message(node, part, full=full and number == 0) for number, part in enumerate(parts)]

    def _message(self, node: str, changes: list[ReferenceChange], *, full: bool) -> KvReference:
        seq = self._sequences[node] = self._sequences.get(node, 0) + 1
        return KvReference(node=node, incarnation=self._incarnation, seq=seq, full=full, changes=changes)


def _joined(changes: list[ReferencesChanged]) -> list[ReferenceChange]:
    """Neighbours that say the same become one; order is kept."""
    joined: list[tuple[bool, bool, list[bytes]]] = []
    for change in changes:
        if not change.keys:
            continue
        if not joined or joined[-1][:2] != (change.referenced, change.unreachable):
            joined.append((change.referenced, change.unreachable, []))
        joined[-1][2].append(change.keys)
    return [
        ReferenceChange(referenced=referenced, unreachable=unreachable, hashes=b"".join(keys))
        for referenced, unreachable, keys in joined
    ]
