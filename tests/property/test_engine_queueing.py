"""Whatever happens to a queue, in any order: nothing is in two places, nothing is left when all has ended."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from schemas.phase import Phase
from tests.engine_world import ROUTER, World, request

NODES = ("node-0", "node-1")
node_names = st.sampled_from(NODES)
phases = st.sampled_from((Phase.PREFILL, Phase.DECODE, Phase.BOTH))


class QueueMachine(RuleBasedStateMachine):
    """Two nodes whose router, engines, pools and network do everything they can do, and everything wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(*NODES, shared_pair=True)
        self.requests: dict[str, tuple[int, str, str]] = {}
        self.epoch = 0
        self.others_fail = False

    @initialize(others_fail=st.booleans(), cached_blocks=st.integers(0, 99))
    def begin(self, others_fail: bool, cached_blocks: int) -> None:
        self.others_fail = others_fail
        self.world.cached_blocks = cached_blocks

    @rule(
        prefill=node_names,
        decode=node_names,
        prompt=st.integers(1, 40),
        new=st.integers(1, 8),
        tokens=st.booleans(),
        fetch=st.booleans(),
        late=st.booleans(),
    )
    def arrive(self, prefill: str, decode: str, prompt: int, new: int, tokens: bool, fetch: bool, late: bool) -> None:
        name = f"q{len(self.requests)}"
        self.requests[name] = (1, prefill, decode)
        keys = {"prompt": prompt, "new": new, "tokens": tokens}
        if not late:
            self.world.serve(decode, request(name, Phase.DECODE, prefill, **keys))
        self.world.serve(prefill, request(name, Phase.PREFILL, decode, fetch=("node-1",) if fetch else (), **keys))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), prefill=node_names, decode=node_names, fresh=st.booleans())
    def place_again(self, data: st.DataObject, prefill: str, decode: str, fresh: bool) -> None:
        """A new attempt, the decode leg that was late, a repetition, or a redirection."""
        name = data.draw(st.sampled_from(sorted(self.requests)))
        attempt, old_prefill, _ = self.requests[name]
        attempt += fresh
        prefill = prefill if fresh else old_prefill
        self.requests[name] = (attempt, prefill, decode)
        for phase, node, peer in ((Phase.DECODE, decode, prefill), (Phase.PREFILL, prefill, decode)):
            room = 100 * attempt + NODES.index(decode)
            self.world.serve(node, request(name, phase, peer, attempt=attempt, room=room))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), node=node_names, phase=st.sampled_from((None, Phase.PREFILL, Phase.DECODE)))
    def cancel(self, data: st.DataObject, node: str, phase: Phase | None) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.world.cancel(node, name, self.requests[name][0], phase)

    @precondition(lambda self: self.world.pending)
    @rule(index=st.integers(0, 50), lost=st.booleans())
    def deliver(self, index: int, lost: bool) -> None:
        self.world.deliver(index, lost=lost)

    @rule(count=st.integers(1, 12))
    def deliver_several(self, count: int) -> None:
        for _ in range(min(count, len(self.world.pending))):
            self.world.deliver(0)

    @rule()
    def run_all_engines(self) -> None:
        for node in self.world.nodes.values():
            for key in list(node.engine):
                self.world.advance(node.name, key)

    @precondition(lambda self: any(node.engine for node in self.world.nodes.values()))
    @rule(data=st.data(), error=st.booleans())
    def run_engine(self, data: st.DataObject, error: bool) -> None:
        inside = [(node.name, key) for node in self.world.nodes.values() for key in node.engine]
        name, key = data.draw(st.sampled_from(inside))
        self.world.advance(name, key, error=error)

    @rule(seconds=st.sampled_from((0.001, 0.05, 0.2, 0.6, 1.0)))
    def pass_time(self, seconds: float) -> None:
        self.world.tick(seconds)

    @rule(node=node_names, phase=phases, stale=st.booleans())
    def switch(self, node: str, phase: Phase, stale: bool) -> None:
        self.epoch += not stale
        self.world.command(node, phase, self.epoch)

    @precondition(lambda self: self.others_fail)
    @rule(node=node_names)
    def restart(self, node: str) -> None:
        """The other node hears that this one has been started anew."""
        other = self.world.nodes[NODES[1 - NODES.index(node)]]
        other.core.nodes.seen(node, 99, self.world.now)

    @precondition(lambda self: self.others_fail)
    @rule()
    def router_restarts(self) -> None:
        for node in self.world.nodes.values():
            node.core.routers.seen(ROUTER, 99, self.world.now)

    @precondition(lambda self: self.others_fail)
    @rule()
    def router_falls_silent(self) -> None:
        """From now on each tick without a heartbeat brings its requests nearer to their end; or it is back."""
        self.world.router_alive = not self.world.router_alive

    @invariant()
    def consistent(self) -> None:
        for node in self.world.nodes.values():
            node.core.check()
            assert node.room >= 0
            assert set(node.pool) >= set(node.core.table.pins)

    def teardown(self) -> None:
        """Left alone, no decode leg waits in vain. When the router gives all up, all is as if nothing had come."""
        if not self.others_fail:
            self.world.settle()
            self.world.assert_no_orphans()
        for name, (attempt, _, _) in self.requests.items():
            for each in range(1, attempt + 1):
                for node in NODES:
                    self.world.cancel(node, name, each)
        self.world.settle(1.0)
        self.world.assert_empty()
        self.world.tick(31.0)
        self.world.tick(0.1)
        for node in self.world.nodes.values():
            assert node.core.table.known == {}
            assert node.core.table.refused == {}


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
