"""Our planner's core as the `scaling_policy` of Dynamo's replay: its metrics in, numbers of workers out.

What the replay tells at a tick (1 s) is less than our nodes and routers tell: of each worker its newest iteration and
its queue, of the requests that ended only how many and their means. So every request of a tick counts as a mean one,
nodes learn from about one iteration a second, and there is no warm-up with both phases. Whose request it was is not
told: requests are dealt to the sessions in turn, so that on average pauses are what Little's law says of that many
sessions. Which worker goes is Dynamo's choice (the newest); our nodes are names for its workers in the order of ids.
"""

from typing import Any

from schemas.kv import Capacities, NodeHello
from schemas.phase import Phase, PhaseState, Split, SwitchState
from schemas.telemetry import Iteration, IterationBatch, KvUse, NodeTelemetry, RequestTelemetry, TierUse
from services.engine.core.timing import attention_pairs
from services.planner.core.options import DecideSettings
from services.planner.core.ordering import Command
from services.planner.core.policy import Planner, PlannerSettings

TICK_S = 1.0
POOLS = {Phase.PREFILL: "prefill", Phase.DECODE: "decode"}
ROUTER = "router"
Snapshot = dict[str, Any]


def prefill_iteration(snapshot: Snapshot, seq: int, now: float) -> Iteration:
    """An iteration of a prefill worker as our nodes tell it; pairs by the batch's means."""
    requests = snapshot["num_prefill_requests"]
    uncached, cached = snapshot["sum_prefill_tokens"], snapshot["sum_prefill_kv_tokens"]
    pairs = requests * attention_pairs(uncached / requests, cached / requests)
    return Iteration(
        t=now,
        seq=seq,
        phase=Phase.PREFILL,
        duration_s=snapshot["wall_time"],
        requests=requests,
        uncached_tokens=uncached,
        attention_pairs=pairs,
        cached_tokens=cached,
    )


def decode_iteration(snapshot: Snapshot, seq: int, now: float) -> Iteration:
    """An iteration of a decode worker: every request got one token."""
    requests = snapshot["num_decode_requests"]
    return Iteration(
        t=now,
        seq=seq,
        phase=Phase.DECODE,
        duration_s=snapshot["wall_time"],
        requests=requests,
        context_tokens=snapshot["sum_decode_kv_tokens"],
        accepted_tokens=requests,
        output_tokens=requests,
        fed_tokens=requests,
    )


def mean_request(traffic: dict[str, Any], number: int, sessions: int, now: float) -> RequestTelemetry:
    """One of the requests that ended since the last tick, of the next of `sessions`."""
    prompt, output = round(traffic["avg_isl"]), max(1, round(traffic["avg_osl"]))
    cached = min(prompt, round(prompt * traffic["avg_kv_hit_rate"]))
    took_s = (traffic["avg_ttft_ms"] + traffic["avg_itl_ms"] * (output - 1)) / 1e3
    return RequestTelemetry(
        id=f"r{number}",
        t=now,
        request=f"r{number}",
        branch=f"s{number % sessions}",
        version=0,
        outcome="stop",
        t_arrive=max(0.0, now - took_s),
        t_end=now,
        prompt_tokens=prompt,
        cached_tokens=cached,
        uncached_tokens=prompt - cached,
        output_tokens=output,
    )


class CorePolicy:
    """What the replay calls. `changes`: (seconds, kind of worker, how many there were, how many were ordered)."""

    def __init__(self, split: Split, sessions: int, capacity_tokens: int, batch_tokens: int, block_tokens: int) -> None:
        decide = DecideSettings(by_start=False)  # its snapshots do not tell of all prefill iterations
        settings = PlannerSettings(
            block_size=block_tokens, switch_timeout_s=3600.0, mode="on", warm_up=False, decide=decide
        )
        self.core = Planner(settings, 0.0)
        self.changes: list[tuple[float, str, int, int]] = []
        self.decisions: list[str] = []
        self._sessions = sessions
        phases = [Phase.PREFILL] * split.prefill + [Phase.DECODE] * split.decode
        self._phases = {f"n{number}": phase for number, phase in enumerate(phases)}
        self._epochs = dict.fromkeys(self._phases, 0)
        self._moving: list[Command] = []
        self._last: dict[tuple[Phase, int], Snapshot] = {}
        self._seq = self._ended = 0
        for name in self._phases:
            self.core.hello(_hello(name, capacity_tokens, batch_tokens, block_tokens))

    def initial_tick_ms(self) -> float:
        """When the first tick is due."""
        return 1e3 * TICK_S

    def on_tick(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """A tick of the replay: how many workers of each kind there are to be, and when the next tick is due."""
        now = metrics["now_ms"] / 1e3
        self.core.router_heard(ROUTER, now)
        self._hear_workers(metrics, now)
        self._hear_requests(metrics.get("traffic"), now)
        self._arrived(metrics, now)
        before = self._counts()
        for decided in self.core.tick(now).decided:
            self.decisions.append(f"{now:.0f} s: {decided.decision.why}")
            if decided.order is not None:
                for command in decided.order.commands:
                    self._phases[command.node], self._epochs[command.node] = command.phase, command.epoch
                self._moving += decided.order.commands
        ordered = self._counts()
        for pool, count in ordered.items():
            if count != before[pool]:
                self.changes.append((now, pool, before[pool], count))
        return {
            "target_prefill": ordered["prefill"],
            "target_decode": ordered["decode"],
            "next_tick_ms": metrics["now_ms"] + 1e3 * TICK_S,
        }

    def _counts(self) -> dict[str, int]:
        """Workers of each kind as ordered."""
        phases = list(self._phases.values())
        return {pool: phases.count(phase) for phase, pool in POOLS.items()}

    def _hear_workers(self, metrics: dict[str, Any], now: float) -> None:
        for phase, pool in POOLS.items():
            for snapshot in metrics[f"{pool}_fpm_snapshots"]:
                self._last[phase, snapshot["worker_id"]] = snapshot
            workers = [*metrics[f"active_{pool}_ids"], *metrics[f"draining_{pool}_ids"]]
            fresh = {snapshot["worker_id"] for snapshot in metrics[f"{pool}_fpm_snapshots"]}
            names = sorted(name for name, its in self._phases.items() if its is phase)
            for place, name in enumerate(names):
                worker = sorted(workers)[place] if place < len(workers) else None
                snapshot = self._last.get((phase, worker), {}) if worker is not None else {}
                if worker in fresh:
                    self._learn(name, phase, snapshot, now)
                self.core.heard(self._beat(name, snapshot, now), now)

    def _learn(self, name: str, phase: Phase, snapshot: Snapshot, now: float) -> None:
        count = snapshot["num_prefill_requests" if phase is Phase.PREFILL else "num_decode_requests"]
        tokens = snapshot["sum_prefill_tokens"] if phase is Phase.PREFILL else count
        if snapshot["wall_time"] > 0.0 and count and tokens:
            self._seq += 1
            told = prefill_iteration if phase is Phase.PREFILL else decode_iteration
            batch = IterationBatch(node=name, incarnation=1, iterations=[told(snapshot, self._seq, now)])
            self.core.iterations(batch, now)

    def _beat(self, name: str, snapshot: Snapshot, now: float) -> NodeTelemetry:
        prefilling, decoding = snapshot.get("num_prefill_requests", 0), snapshot.get("num_decode_requests", 0)
        return NodeTelemetry(
            node=name,
            t=now,
            incarnation=1,
            engine_incarnation=1,
            phase=self._phases[name],
            epoch=self._epochs[name],
            waiting=snapshot.get("num_queued_prefill", 0),
            running=prefilling + decoding,
            running_prefill=prefilling,
            running_decode=decoding,
            kv=KvUse(l1=TierUse(used=0, total=0), l2=TierUse(used=0, total=0)),
            last_kv_seq=0,
        )

    def _hear_requests(self, traffic: dict[str, Any] | None, now: float) -> None:
        for _ in range(int(traffic["shape_count"]) if traffic else 0):
            assert traffic is not None
            self._ended += 1
            self.core.request_ended(mean_request(traffic, self._ended, self._sessions, now), now)

    def _arrived(self, metrics: dict[str, Any], now: float) -> None:
        """A switch has ended when nothing starts or drains any more and each pool is as large as was ordered."""
        changing = any(metrics[f"{state}_{pool}_ids"] for state in ("starting", "draining") for pool in POOLS.values())
        there = all(len(metrics[f"active_{pool}_ids"]) == count for pool, count in self._counts().items())
        if changing or not there:
            return
        for command in self._moving:
            state = PhaseState(
                id=f"{command.node}/{command.epoch}",
                t=now,
                node=command.node,
                phase=command.phase,
                epoch=command.epoch,
                state=SwitchState.SWITCHED,
            )
            self.core.phase_state(state, now)
        self._moving = []


def _hello(name: str, capacity_tokens: int, batch_tokens: int, block_tokens: int) -> NodeHello:
    return NodeHello(
        node=name,
        incarnation=1,
        engine_incarnation=1,
        model="replay",
        block_size=block_tokens,
        key_version="replay",
        ranks=1,
        engine="replay",
        dtype="",
        capacities=Capacities(l1_tokens=capacity_tokens, l2_tokens=0, running=256),
        transfer="",
        batch_tokens=batch_tokens,
    )
