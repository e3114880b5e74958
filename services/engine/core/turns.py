"""Whose turn it is on a device that runs both phases."""


class Turns:
    """Prefill and decode get equal time while both have work; with one of them at work it gets all.

    One prefill iteration takes as long as hundreds of decode iterations. If they took turns one by one, an answer that
    is left on a node which has gone to prefill would get a token every few seconds, and its switch would not end.
    """

    def __init__(self) -> None:
        self.owed_s = 0.0
        """Seconds that decode may take before prefill goes on."""

    def prefill_due(self, *, decoding: bool) -> bool:
        """Whether prefill may run now; `decoding`: whether decode has work."""
        if not decoding:
            self.owed_s = 0.0
        return self.owed_s <= 0.0

    def prefilled(self, duration_s: float) -> None:
        """A prefill iteration has ended."""
        self.owed_s += duration_s

    def decoded(self, duration_s: float) -> None:
        """Decode iterations have ended."""
        self.owed_s = max(0.0, self.owed_s - duration_s)
