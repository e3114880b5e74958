"""Telling pools about their copies: changes gather for a moment and go out in order, numbered per node."""

import asyncio

import msgspec

from schemas.codec import encode
from schemas.kv import KEY_BYTES, KvReference, ReferenceChange, ValueChange
from schemas.subjects import Subjects
from services.bus import Bus, BusError
from services.directory.core.effects import ReferencesChanged, ValuesChanged
from services.directory.metrics import DirectoryMetrics
from services.observe import RateLimitedLog

GATHER_S = 0.015
LARGEST_BYTES = 512 << 10
Change = ReferencesChanged | ValuesChanged


class Announcer:
    """Publishes `kv.reference`. A lost message leaves a gap in the numbers, and its pool asks for everything."""

    def __init__(
        self, bus: Bus, subjects: Subjects, incarnation: int, metrics: DirectoryMetrics, log: RateLimitedLog
    ) -> None:
        self._bus, self._subjects, self._incarnation = bus, subjects, incarnation
        self._muted = False
        self._metrics, self._log = metrics, log
        self._waiting: dict[str, list[Change]] = {}
        self._sequences: dict[str, int] = {}
        self._wake = asyncio.Event()

    def tell(self, change: Change) -> None:
        """Queue a change for its node; what was queued before everything is said anew is void."""
        if self._muted:
            return
        waiting = self._waiting.setdefault(change.node, [])
        if isinstance(change, ReferencesChanged) and change.full:
            waiting.clear()
        waiting.append(change)
        self._wake.set()

    def mute(self) -> None:
        """Another directory speaks to the pools."""
        self._muted = True
        self._waiting.clear()

    def speak(self, incarnation: int) -> None:
        """Speak to the pools again, under a new incarnation; everything is to be said anew."""
        self._muted, self._incarnation = False, incarnation
        self._sequences.clear()

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
                told = sum(len(change.hashes) for change in message.changes)
                told += sum(len(worth.hashes) for worth in message.values)
                self._metrics.told.inc(told // KEY_BYTES)

    def _messages(self, node: str, changes: list[Change], largest: int) -> list[KvReference]:
        first = changes[0]
        full = isinstance(first, ReferencesChanged) and first.full
        parts: list[tuple[list[ReferenceChange], list[ValueChange]]] = [([], [])]
        room = largest
        for change in _joined(changes):
            for start in range(0, len(change.hashes), largest):
                part = msgspec.structs.replace(change, hashes=change.hashes[start : start + largest])
                if len(part.hashes) > room or (parts[-1][1] and isinstance(part, ReferenceChange)):
                    parts.append(([], []))
                    room = largest
                if isinstance(part, ReferenceChange):
                    parts[-1][0].append(part)
                else:
                    parts[-1][1].append(part)
                room -= len(part.hashes)
        return [self._message(node, part, full=full and number == 0) for number, part in enumerate(parts)]

    def _message(self, node: str, said: tuple[list[ReferenceChange], list[ValueChange]], *, full: bool) -> KvReference:
        seq = self._sequences[node] = self._sequences.get(node, 0) + 1
        changes, values = said
        return KvReference(node=node, incarnation=self._incarnation, seq=seq, full=full, changes=changes, values=values)


def _joined(changes: list[Change]) -> list[ReferenceChange | ValueChange]:
    """Neighbours that say the same become one; order is kept."""
    joined: list[tuple[Change, list[bytes]]] = []
    for change in changes:
        if not change.keys:
            continue
        if not joined or type(joined[-1][0]) is not type(change) or joined[-1][0][1:3] != change[1:3]:
            joined.append((change, []))
        joined[-1][1].append(change.keys)
    return [_change(change, b"".join(keys)) for change, keys in joined]


def _change(change: Change, hashes: bytes) -> ReferenceChange | ValueChange:
    if isinstance(change, ReferencesChanged):
        return ReferenceChange(referenced=change.referenced, unreachable=change.unreachable, hashes=hashes)
    return ValueChange(value=change.value, referenced=change.referenced, hashes=hashes)
