"""Session affinity: every session has its node.

Rule: Model Gateway's `manual` policy (lightseekorg/smg policies/manual.rs): a routing key (here the session, sub-agents
with it) is assigned to a worker at random when it is first seen and stays there while that worker lives. Decode round
robin; nodes and their fixed split are plain SGLang's (`static`). Approximate: the key is not forgotten after 4 h idle.
"""

from collections.abc import Sequence

from schemas.phase import Phase
from services.simulator.call import Call
from services.simulator.passive import Passive
from services.simulator.system import Action, Place
from services.simulator.systems.static import RoundRobin, Static


class Sticky(Passive):
    """`_assigned`: a session's prefill node."""

    id = "sticky"
    traits = Static.traits

    def __init__(self) -> None:
        self.decode = RoundRobin()
        self._assigned: dict[str, str] = {}

    def arrived(self, call: Call, now: float) -> Sequence[Action]:
        prefill = [node.name for node in self.cluster.serving(Phase.PREFILL)]
        if self._assigned.get(call.agent) not in prefill:
            self._assigned[call.agent] = prefill[int(self.cluster.draw() * len(prefill))]
        decode = self.decode.choose(self.cluster.serving(Phase.DECODE))
        return (Place(call, self._assigned[call.agent], decode),)
