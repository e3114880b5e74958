"""Two directories at once: the one that started later serves, the older one steps down and stands by."""

from __future__ import annotations


class Seniority:
    """Hears other directories by their incarnation. A newer one counts as soon as it is no longer blind, so that
    somebody serves at any time; when it falls silent for `timeout_s`, whoever stands by takes over."""

    def __init__(self, incarnation: int, timeout_s: float) -> None:
        self.incarnation = incarnation
        self.timeout_s = timeout_s
        self.newer: int | None = None
        self._heard = 0.0

    def hear(self, incarnation: int, now: float, *, blind: bool) -> bool:
        """Another directory lives; whether this one steps down now. One that turns blind goes."""
        if blind and incarnation == self.newer:
            self._heard = float("-inf")
        if incarnation <= self.incarnation or blind or (self.newer is not None and incarnation < self.newer):
            return False
        steps_down = self.newer is None
        self.newer, self._heard = incarnation, now
        return steps_down

    def due(self, now: float) -> bool:
        """Whether the newer one has been silent for so long that it is to be taken over."""
        return self.newer is not None and now - self._heard > self.timeout_s

    def succeed(self, incarnation: int) -> None:
        """Serve under an incarnation above all that were heard. ValueError when it is not."""
        if incarnation <= max(self.incarnation, self.newer or 0):
            raise ValueError(f"incarnation {incarnation} is not above {max(self.incarnation, self.newer or 0)}")
        self.incarnation, self.newer = incarnation, None

    def check(self) -> None:
        assert self.newer is None or self.newer > self.incarnation
