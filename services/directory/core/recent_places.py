"""Places in runs where the next message is likely to begin: where one message ended, or a context forked."""

from services.directory.core.run import Run

KEPT = 16_384
_OFFSET_BITS = 32


class RecentPlaces:
    """Key to (ident of the run, offset in it), of the last KEPT to 2 KEPT places. A run may have changed since."""

    def __init__(self) -> None:
        self._recent: dict[int, int] = {}
        self._older: dict[int, int] = {}

    def get(self, key: int) -> tuple[int, int] | None:
        """Where the block with this key was."""
        place = self._recent.get(key) or self._older.get(key)
        return None if place is None else (place >> _OFFSET_BITS, place & (1 << _OFFSET_BITS) - 1)

    def put(self, run: Run, offset: int) -> None:
        """Remember a block of `run`."""
        if len(self._recent) >= KEPT:
            self._older, self._recent = self._recent, {}
        self._recent[run.keys[offset]] = run.ident << _OFFSET_BITS | offset
