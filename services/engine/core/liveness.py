"""Who of the others is still there, judged from their heartbeats alone."""

from dataclasses import dataclass, field

RESTARTED = "restarted"
_FORGET_AFTER = 20
"""Somebody whom nobody depends on is forgotten after this many timeouts of silence."""


@dataclass(slots=True)
class Witness:
    """The last sign of life of one other service; times on the own clock. `restarted`: since we depend on it."""

    seen_at: float
    incarnation: int | None = None
    restarted: bool = False


@dataclass(slots=True)
class Liveness:
    """Heartbeats of one kind of service. Somebody never heard of has `timeout_s` from the first time it is expected.

    Time during which we ourselves heard nothing (a broken connection, a stopped process) does not count.
    """

    timeout_s: float
    stall_s: float = 1.0
    expected: set[str] = field(default_factory=set)
    witnesses: dict[str, Witness] = field(default_factory=dict)
    looked_at: float | None = None

    def expect(self, name: str, now: float) -> None:
        """From now on we depend on `name`."""
        if name in self.expected:
            return
        self.expected.add(name)
        witness = self.witnesses.setdefault(name, Witness(now))
        witness.restarted = False
        if now - witness.seen_at > self.timeout_s:
            witness.seen_at = now

    def seen(self, name: str, incarnation: int, now: float) -> None:
        """A heartbeat."""
        witness = self.witnesses.setdefault(name, Witness(now))
        witness.restarted |= witness.incarnation not in (None, incarnation)
        witness.seen_at, witness.incarnation = now, incarnation

    def gone(self, now: float, *, listening: bool) -> dict[str, str]:
        """Those expected that are lost, with the reason: silent for too long, or started anew. Said once.

        Call it at least every `stall_s`; a longer gap, or not `listening`, is taken off everybody's silence.
        """
        since = 0.0 if self.looked_at is None else now - self.looked_at
        self.looked_at = now
        if not listening or since > self.stall_s:
            for witness in self.witnesses.values():
                witness.seen_at += since
            return {}
        lost: dict[str, str] = {}
        for name in self.expected:
            witness = self.witnesses[name]
            if witness.restarted:
                lost[name] = RESTARTED
                witness.restarted = False
            elif now - witness.seen_at > self.timeout_s:
                lost[name] = f"silent for {now - witness.seen_at:.1f} s (limit {self.timeout_s:g} s)"
        self.expected -= {name for name, why in lost.items() if why != RESTARTED}
        return lost

    def keep(self, names: set[str], now: float) -> None:
        """Nobody depends on anybody but `names` any more."""
        self.expected &= names
        old = now - _FORGET_AFTER * self.timeout_s
        for name in [n for n, w in self.witnesses.items() if n not in self.expected and w.seen_at < old]:
            del self.witnesses[name]

    def check(self) -> None:
        assert self.expected <= self.witnesses.keys(), self.expected - self.witnesses.keys()
