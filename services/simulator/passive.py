"""A system that does nothing but what its subclass says: the common start of the small ones."""

from collections.abc import Sequence

from services.simulator.call import Call
from services.simulator.system import Action, Cluster, Traits


class Passive:
    """Everything of `System` but `arrived`, doing nothing. `self.cluster` is set by `begin`."""

    id = "passive"
    traits = Traits()
    cluster: Cluster

    def begin(self, cluster: Cluster, now: float) -> None:
        self.cluster = cluster

    def prefill_started(self, call: Call, now: float) -> None:
        return None

    def prefilled(self, call: Call, now: float) -> Sequence[Action]:
        return ()

    def ended(self, call: Call, now: float) -> Sequence[Action]:
        return ()

    def moved(self, node: str, now: float) -> Sequence[Action]:
        return ()

    def next_wake(self, now: float) -> float | None:
        return None

    def wake(self, now: float) -> Sequence[Action]:
        return ()
