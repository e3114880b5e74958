"""SGLang's own role switch, ordered by our planner: the engine drains, forgets all KV, and serves the other role.

Rule: sglang 0.5.23, `POST /pd_role_switch` (srt/disaggregation/role_switch.py): the instance must be idle, tears its
queues and KV manager down, rebuilds them and captures decode graphs; prefix cache and HiCache storage are cleared at
every flip; speculative decoding is rejected, so an iteration gives one token. There is no policy: the operator decides.
Here the operator is our planner, without the warm-up that runs both phases on a node (it cannot be ordered), so a
node's model of the phase it has not run is borrowed from those that have. Behind Model Gateway `cache_aware`, round
robin decode, nodes and host memory as in `static`.

Approximate: capturing the decode graphs takes 30 s both ways (not published; seconds to minutes by reports).
"""

from collections.abc import Sequence

from schemas.phase import Phase
from services.engine.core.timing import PrefillTerms
from services.planner.core.options import ON
from services.planner.core.policy import PlannerSettings
from services.simulator.call import Call
from services.simulator.passive import Passive
from services.simulator.planner import BEAT_S, SimulatedPlanner
from services.simulator.system import Action, Cluster, Place, SwitchCost, Traits
from services.simulator.systems.static import CacheAware, RoundRobin

CAPTURE_S = 30.0


class SglangRoleSwitch(Passive):
    """`_held`: requests that found no node of a phase."""

    id = "sglang-role-switch"
    traits = Traits(
        token_after_transfer=True,
        host_copies=4,
        speculates=False,
        switch=SwitchCost(capture_s=CAPTURE_S, keeps_kv=False),
    )
    planner: SimulatedPlanner

    def __init__(self) -> None:
        self.prefill, self.decode = CacheAware(), RoundRobin()
        self._held: dict[str, Call] = {}
        self._beat_at = 0.0

    def begin(self, cluster: Cluster, now: float) -> None:
        super().begin(cluster, now)
        settings = PlannerSettings(block_size=cluster.block_tokens, switch_timeout_s=3600.0, mode=ON, warm_up=False)
        self.planner = SimulatedPlanner(settings, cluster, now)

    def arrived(self, call: Call, now: float) -> Sequence[Action]:
        prefill, decode = self.cluster.serving(Phase.PREFILL), self.cluster.serving(Phase.DECODE)
        if not prefill or not decode:
            self._held[call.id] = call
            return ()
        return (Place(call, self.prefill.choose(call, prefill), self.decode.choose(decode)),)

    def ended(self, call: Call, now: float) -> Sequence[Action]:
        lineage = "opens" if call.pause_s is None else "extends"
        self.planner.answered(call, lineage, call.ideal_blocks * self.cluster.block_tokens, now)
        return ()

    def next_wake(self, now: float) -> float | None:
        return self._beat_at

    def wake(self, now: float) -> Sequence[Action]:
        self._beat_at = now + BEAT_S
        moves = self.planner.beat(now)
        for move in moves:
            self.prefill.forget(move.node)
        return moves

    def moved(self, node: str, now: float) -> Sequence[Action]:
        self.planner.moved(node, now)
        held, self._held = self._held, {}
        return [action for call in held.values() for action in self.arrived(call, now)]

    def prefill_iterated(
        self, node: str, terms: PrefillTerms, cached_tokens: int, duration_s: float, now: float
    ) -> None:
        self.planner.prefill_iterated(node, terms, cached_tokens, duration_s, now)

    def decode_iterated(
        self, node: str, count: int, requests: int, context_tokens: float, duration_s: float, now: float
    ) -> None:
        self.planner.decode_iterated(node, count, requests, context_tokens, duration_s, now)
