"""The location events of one node, put in order: what to apply, what to ignore, when to ask for a snapshot."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from schemas.kv import KvLocation


class Arrival(StrEnum):
    """What a message was: `gap` and `behind` (a heartbeat ahead of us) show that others were lost."""

    APPLIED = "applied"
    HEARTBEAT = "heartbeat"
    DUPLICATE = "duplicate"
    LATE = "late"
    GAP = "gap"
    BUFFERED = "buffered"
    OVERFLOW = "overflow"


class Step(NamedTuple):
    """Apply the message if `arrival` says so, after forgetting what the node held before if it began a `new_life`."""

    arrival: Arrival
    new_life: bool = False


_NEXT = Step(Arrival.APPLIED)


class NodeFeed:
    """A cursor (incarnation, seq). A life starts at seq 0 with nothing held, so its first message needs no snapshot.

    Out of order means not `synced`: a snapshot is needed, and until it is in later messages wait in `buffer`, at most
    `buffer_messages` of them (more are left out and make a new gap when their turn comes). Within an incarnation the
    cursor never goes back. A lower incarnation is late, unless the node has fallen silent: then it is the next life,
    whose clock went back.
    """

    def __init__(self, buffer_messages: int) -> None:
        self.incarnation: int | None = None
        self.seq = 0
        self.synced = True
        self.silent = False
        self.buffer: dict[int, KvLocation] = {}
        self._room = buffer_messages

    def offer(self, message: KvLocation) -> Step:
        """One message of the node, heartbeats included."""
        if self.is_late(message.incarnation):
            return Step(Arrival.LATE)
        self.silent = False
        new_life = self.incarnation is not None and message.incarnation != self.incarnation
        if message.incarnation != self.incarnation:
            self._begin(message.incarnation)
        was_synced = self.synced
        if not message.changes:
            self.synced = was_synced and message.seq <= self.seq
            return Step(Arrival.GAP if was_synced and not self.synced else Arrival.HEARTBEAT, new_life)
        if message.seq <= self.seq or message.seq in self.buffer:
            return Step(Arrival.DUPLICATE, new_life)
        if was_synced and message.seq == self.seq + 1:
            self.seq = message.seq
            return Step(Arrival.APPLIED, new_life) if new_life else _NEXT
        self.synced = False
        if len(self.buffer) >= self._room:
            return Step(Arrival.OVERFLOW, new_life)
        self.buffer[message.seq] = message
        return Step(Arrival.GAP if was_synced else Arrival.BUFFERED, new_life)

    def is_late(self, incarnation: int) -> bool:
        """Whether the life of this incarnation is over, since a later one speaks."""
        return self.incarnation is not None and incarnation < self.incarnation and not self.silent

    def fall_silent(self) -> None:
        """The life we knew may be over: nothing of it is to be trusted, another may follow under any number."""
        self.silent, self.synced = True, False

    def doubt(self) -> None:
        """What we know of the node is not to be trusted: a snapshot is needed."""
        self.synced = False

    def wants(self, incarnation: int, seq: int) -> bool:
        """Whether a snapshot as of (incarnation, seq) is needed and not older than what we know."""
        if incarnation != self.incarnation:
            return not self.is_late(incarnation)
        return not self.synced and seq >= self.seq

    def loaded(self, incarnation: int, seq: int) -> None:
        """A wanted snapshot replaced what we knew; `following` has the rest."""
        if incarnation != self.incarnation:
            self._begin(incarnation)
        self.seq, self.synced, self.silent = seq, False, False
        self.buffer = {number: message for number, message in self.buffer.items() if number > seq}

    def following(self) -> KvLocation | None:
        """The next message after a snapshot, out of the buffer; with None we are synced, or there is a new gap."""
        message = self.buffer.pop(self.seq + 1, None)
        if message is not None:
            self.seq += 1
        else:
            self.synced = not self.buffer
        return message

    def _begin(self, incarnation: int) -> None:
        self.incarnation, self.seq, self.synced = incarnation, 0, True
        self.buffer = {}

    def check(self) -> None:
        assert self.seq >= 0
        assert not self.synced or not self.buffer, f"{len(self.buffer)} messages wait although nothing is missing"
        assert all(number > 0 for number in self.buffer)
        assert len(self.buffer) <= self._room
