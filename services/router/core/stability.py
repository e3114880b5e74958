"""Prompts that break at a place that changes with every request: a counter, a date or a checksum before all the rest.

Compared are the heads of prompts that follow one another: same branch, or same family, or among the last ones that name
neither. A prompt that only grows is stable. One that differs somewhere and goes on as before behind it breaks there;
the second time running at the same place it is reported, so within three requests.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

UNIT_BYTES: Final = 4
HEAD_UNITS: Final = 32_768
"""So much of the front of a prompt is kept and compared."""
SAME_AGAIN: Final = 32
"""So many units alike behind the place prove that only the place changed."""
LONGEST_CHANGE: Final = 24
NAMED_KEPT: Final = 3
"""Side requests of a branch come between its own."""
ANONYMOUS_KEPT: Final = 8
Units = npt.NDArray[np.uint32]
Key = tuple[str, str | None]
"""(tenant, branch or family); None for prompts that name neither."""


@dataclass(frozen=True, slots=True)
class Break:
    """Where prompts break: unit number `position`, and what stood there, as packed units before and now."""

    position: int
    before: bytes
    now: bytes


@dataclass(slots=True)
class _Line:
    """Prompts that follow one another: the last head, where it broke, and whether that was said."""

    head: bytes
    broke_at: int | None = None
    reported: bool = False


@dataclass(slots=True)
class _Group:
    lines: list[_Line] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(len(line.head) for line in self.lines)


class Stability:
    """Heads of the last prompts by key, `limit_bytes` of them together; those not seen for longest go first."""

    def __init__(self, limit_bytes: int = 64 << 20) -> None:
        self.limit_bytes = limit_bytes
        self._groups: OrderedDict[Key, _Group] = OrderedDict()
        self._bytes = 0

    def observe(self, key: Key, packed: bytes) -> Break | None:
        """A prompt comes (units of 4 bytes). A Break the second time running that it breaks at one place."""
        head = packed[: HEAD_UNITS * UNIT_BYTES]
        group = self._groups.setdefault(key, _Group())
        self._groups.move_to_end(key)
        self._bytes -= group.size
        found = self._compare(group, head, NAMED_KEPT if key[1] is not None else ANONYMOUS_KEPT)
        self._bytes += group.size
        while self._bytes > self.limit_bytes and len(self._groups) > 1:
            _, oldest = self._groups.popitem(last=False)
            self._bytes -= oldest.size
        return found

    def _compare(self, group: _Group, head: bytes, kept: int) -> Break | None:
        broken: tuple[_Line, Break] | None = None
        for line in group.lines:
            same = common_units(line.head, head)
            if same * UNIT_BYTES >= min(len(line.head), len(head)):
                group.lines.remove(line)
                group.lines.append(_Line(max(head, line.head, key=len)))
                return None
            if broken is None and (found := change_at(line.head, head, same)) is not None:
                broken = line, found
        if broken is None:
            group.lines = [*group.lines, _Line(head)][-kept:]
            return None
        line, found = broken
        again = line.broke_at is not None and abs(line.broke_at - found.position) <= LONGEST_CHANGE
        tell = again and not line.reported
        group.lines.remove(line)
        group.lines.append(_Line(head, found.position, line.reported or tell))
        return found if tell else None

    def check(self) -> None:
        """What is kept is within its bounds."""
        assert self._bytes == sum(group.size for group in self._groups.values())
        assert self._bytes <= self.limit_bytes or len(self._groups) == 1
        for (_, name), group in self._groups.items():
            assert 0 < len(group.lines) <= (NAMED_KEPT if name is not None else ANONYMOUS_KEPT)


def common_units(one: bytes, other: bytes) -> int:
    """How many leading units are alike."""
    a, b = _units(one), _units(other)
    shorter = min(len(a), len(b))
    apart = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(apart[0]) if len(apart) else shorter


def change_at(before: bytes, now: bytes, position: int) -> Break | None:
    """What changed at `position`, if both go on alike behind it; the shortest such change."""
    start, window = position * UNIT_BYTES, SAME_AGAIN * UNIT_BYTES
    ends = [start + length * UNIT_BYTES for length in range(LONGEST_CHANGE + 1)]
    goes_on = {now[end : end + window]: end for end in reversed(ends) if end + window <= len(now)}
    alike = ((end, goes_on.get(before[end : end + window])) for end in ends)
    pairs = [(max(end, other), end, other) for end, other in alike if other is not None]
    if not pairs:
        return None
    _, old, new = min(pairs)
    return Break(position, before[start:old], now[start:new])


def _units(packed: bytes) -> Units:
    return np.frombuffer(packed, dtype="<u4")
