"""Who keeps which blocks from going: holds by id, with an end, idempotent to release."""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Hold:
    """The slots one id holds, each once; `owner` is the connection it ends with, None for none."""

    owner: int | None
    expires_s: float
    slots: dict[int, None] = field(default_factory=dict)


class Holds:
    """All holds of one kind: the pins of this node's engine, or the leases of its peers."""

    def __init__(self) -> None:
        self._holds: dict[str, Hold] = {}
        self._by_owner: dict[int, dict[str, None]] = {}
        self._expiries: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._holds)

    def __contains__(self, id_: str) -> bool:
        return id_ in self._holds

    def open(self, id_: str, owner: int | None, expires_s: float) -> list[int]:
        """Begin a hold without slots; one of the same id ends, and its slots are returned."""
        ended = self.release(id_)
        self._holds[id_] = Hold(owner, expires_s)
        heapq.heappush(self._expiries, (expires_s, id_))
        if owner is not None:
            self._by_owner.setdefault(owner, {})[id_] = None
        return ended

    def add(self, id_: str, slots: Iterable[int]) -> list[int]:
        """Hold these slots too; returns those that the id did not hold before."""
        held = self._holds[id_].slots
        new = [slot for slot in slots if slot not in held]
        held.update(dict.fromkeys(new))
        return new

    def keep(self, id_: str, slots: Iterable[int]) -> list[int]:
        """Let go of all but these; returns the slots let go. An unknown id holds nothing."""
        hold = self._holds.get(id_)
        if hold is None:
            return []
        kept = dict.fromkeys(slot for slot in slots if slot in hold.slots)
        gone = [slot for slot in hold.slots if slot not in kept]
        hold.slots = kept
        return gone

    def release(self, id_: str) -> list[int]:
        """End a hold and return its slots; none for an unknown id."""
        hold = self._holds.pop(id_, None)
        if hold is None:
            return []
        if hold.owner is not None:
            mine = self._by_owner[hold.owner]
            del mine[id_]
            if not mine:
                del self._by_owner[hold.owner]
        return list(hold.slots)

    def drop_owner(self, owner: int) -> list[int]:
        """End every hold of `owner`; returns a slot once for each hold that had it."""
        return [slot for id_ in list(self._by_owner.get(owner, ())) for slot in self.release(id_)]

    def expire(self, now_s: float) -> tuple[int, list[int]]:
        """End the holds whose time is over: how many, and their slots (once for each hold)."""
        ended, slots = 0, []
        while self._expiries and self._expiries[0][0] <= now_s:
            expires_s, id_ = heapq.heappop(self._expiries)
            hold = self._holds.get(id_)
            if hold is not None and hold.expires_s == expires_s:
                ended += 1
                slots += self.release(id_)
        self._trim()
        return ended, slots

    def _trim(self) -> None:
        """Ids are released long before they expire: keep the heap within twice the live ones."""
        if len(self._expiries) > 2 * len(self._holds) + 64:
            self._expiries = [(hold.expires_s, id_) for id_, hold in self._holds.items()]
            heapq.heapify(self._expiries)

    def counts(self) -> dict[int, int]:
        """How many holds each slot is in; for checks."""
        counts: dict[int, int] = {}
        for hold in self._holds.values():
            for slot in hold.slots:
                counts[slot] = counts.get(slot, 0) + 1
        return counts

    def check(self) -> None:
        """Owners and expiries know every hold."""
        owned = {id_ for ids in self._by_owner.values() for id_ in ids}
        assert owned == {id_ for id_, hold in self._holds.items() if hold.owner is not None}
        entries = set(self._expiries)
        assert all((hold.expires_s, id_) in entries for id_, hold in self._holds.items())
