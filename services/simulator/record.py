"""What a run leaves behind: every answered request, the switches, and how queues and split went over time."""

from dataclasses import dataclass, field

from schemas.phase import Phase
from services.engine.core.timing import PrefillTerms
from services.simulator.call import Call
from services.simulator.world import Watch, World

SAMPLE_S = 10.0
MICRO = 1e6


@dataclass(frozen=True, slots=True)
class Sample:
    """One look: nodes per phase, prefills waiting, requests in decode.

    Since the run began: `prefill_s` that nodes spent in prefill iterations, `preloaded_tokens` brought ahead.
    """

    at: float
    split: str
    prefill_nodes: int
    decode_nodes: int
    waiting: int
    decoding: int
    prefill_s: float = 0.0
    preloaded_tokens: int = 0


@dataclass(slots=True)
class Recorder(Watch):
    """Keeps what reports need; with `slices` every iteration as well, for a trace viewer."""

    slices: bool = False
    calls: list[Call] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    events: list[dict[str, object]] = field(default_factory=list)
    prefill_s: float = 0.0
    preloaded_tokens: int = 0

    def follow(self, world: World) -> None:
        """Sample from now on."""

        def look(now: float) -> None:
            nodes = world.nodes.values()
            waiting = sum(call.prefill_started_at is None for node in nodes for call in node.prefill_calls.values())
            phases = [node.phase for node in nodes]
            self.samples.append(
                Sample(
                    now,
                    world.split,
                    phases.count(Phase.PREFILL),
                    phases.count(Phase.DECODE),
                    waiting,
                    sum(node.decoding for node in nodes),
                    self.prefill_s,
                    self.preloaded_tokens,
                )
            )
            world.agenda.at(now + SAMPLE_S, look)

        look(world.agenda.now)

    def answered(self, call: Call) -> None:
        self.calls.append(call)
        if self.slices:
            self._request(call)

    def prefill_iterated(
        self, node: str, terms: PrefillTerms, cached_tokens: int, duration_s: float, now: float
    ) -> None:
        self.prefill_s += duration_s
        if self.slices:
            name = f"prefill {terms.requests}"
            self._slice(node, "prefill", name, now - duration_s, duration_s, {"uncached_tokens": terms.uncached_tokens})

    def preloaded(self, tokens: int, now: float) -> None:
        self.preloaded_tokens += tokens

    def decode_iterated(
        self, node: str, count: int, requests: int, context_tokens: float, duration_s: float, now: float
    ) -> None:
        if self.slices:
            name = f"decode {requests}"
            self._slice(node, "decode", name, now - duration_s, duration_s, {"iterations": count})

    def _slice(self, node: str, row: str, name: str, start: float, seconds: float, args: dict[str, object]) -> None:
        """A complete event of the Trace Event Format (what Perfetto opens)."""
        self.events.append(
            {
                "name": name,
                "ph": "X",
                "ts": start * MICRO,
                "dur": seconds * MICRO,
                "pid": node,
                "tid": row,
                "args": args,
            }
        )

    def _request(self, call: Call) -> None:
        """A request as an asynchronous track: waiting, prefill, decode."""
        steps = (
            ("wait", call.arrived_at, call.prefill_started_at),
            ("prefill", call.prefill_started_at, call.prefilled_at),
            ("decode", call.prefilled_at, call.ended_at),
        )
        for name, start, end in steps:
            if start is not None and end is not None:
                common: dict[str, object] = {"name": name, "cat": "request", "id": call.id, "pid": "requests", "tid": 0}
                self.events += [common | {"ph": "b", "ts": start * MICRO}, common | {"ph": "e", "ts": end * MICRO}]
