"""Places in runs where the next message is likely to begin or to end: where one message ended, a context forked, or
what was removed last began, since chains go from their end to their start."""

from services.directory.core.run import Keys, Run

KEPT = 16_384
_OFFSET_BITS = 32


class RecentPlaces:
    """Key to (ident of the run, offset in it), of the last KEPT to 2 KEPT places; a run may have changed since.

    `runs` by ident and `ends` by last key are the tree's own.
    """

    def __init__(self, runs: list[Run | None], ends: dict[int, Run]) -> None:
        self._runs, self._ends = runs, ends
        self._recent: dict[int, int] = {}
        self._older: dict[int, int] = {}

    def find(self, key: int) -> tuple[Run, int] | None:
        """The run that holds `key` and its offset there, if that is the end of a run or a recent place."""
        end = self._ends.get(key)
        if end is not None:
            return end, len(end.keys) - 1
        place = self._recent.get(key) or self._older.get(key)
        if place is None:
            return None
        run, offset = self._runs[place >> _OFFSET_BITS], place & (1 << _OFFSET_BITS) - 1
        return (run, offset) if run is not None and offset < len(run.keys) and run.keys[offset] == key else None

    def begun_by(self, keys: Keys) -> tuple[Run, int] | None:
        """Where a chain begins that ends at the end of a run or at a recent place."""
        place = self.find(keys[-1])
        if place is None:
            return None
        run, first = place[0], place[1] + 1 - len(keys)
        return (run, first) if first >= 0 and run.keys[first] == keys[0] else None

    def put(self, run: Run, offset: int) -> None:
        """Remember a block of `run`."""
        if len(self._recent) >= KEPT:
            self._older, self._recent = self._recent, {}
        self._recent[run.keys[offset]] = run.ident << _OFFSET_BITS | offset

    def put_before(self, run: Run, offset: int) -> None:
        """Remember the block before this one of `run`, if it has one."""
        if offset:
            self.put(run, offset - 1)
        elif run.parent is not None and run.offset:
            self.put(run.parent, run.offset - 1)
