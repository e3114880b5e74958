"""What began in a slice is taken from nodes that tell it at both ends; else the slice is that of what ended."""

import msgspec

from schemas.phase import Phase, Workload
from schemas.telemetry import Iteration, IterationBatch, RequestTelemetry
from services.planner.core.windows import Windows, WindowSettings

LONG = (0,) * 11 + (20,)


def ended(number: int) -> RequestTelemetry:
    return RequestTelemetry(
        id=str(number),
        t=1.0,
        request=str(number),
        branch=None,
        version=None,
        outcome="ok",
        t_arrive=0.0,
        t_end=1.0,
        prompt_tokens=500,
        cached_tokens=100,
        uncached_tokens=400,
        output_tokens=300,
    )


def computed() -> IterationBatch:
    one = Iteration(
        t=1.0, seq=1, phase=Phase.PREFILL, duration_s=0.1, requests=9, uncached_tokens=90_000, attention_pairs=1e9
    )
    return IterationBatch(node="n0", incarnation=1, iterations=[one])


class Cluster:
    """A node `n0` in two slices of 10 s; in the second, 10 requests end and others are computed."""

    def __init__(self) -> None:
        self.windows = Windows(WindowSettings(slice_s=10.0, slices=10), 0.0)

    def second(self, second: int, **nodes: tuple[tuple[int, ...], int]) -> None:
        self.windows.advance(float(second))
        self.windows.router_beat("r", float(second))
        for node, (lengths, engine) in nodes.items():
            self.windows.node_beat(node, 20, 20, float(second), lengths, engine)
        if second == 15:
            for number in range(10):
                self.windows.request(ended(number))
            self.windows.iterations(computed())

    def of_what_ended(self) -> bool:
        self.windows.advance(20.0)
        self.windows.check()
        workload = self.windows.latest(1)[0].workload
        assert workload is not None
        return (workload.t_uc, workload.t_out) == (400.0, 300.0)


def test_the_same_nodes_tell_what_began() -> None:
    cluster = Cluster()
    for second in range(20):
        cluster.second(second, n0=(LONG, 1))
    assert not cluster.of_what_ended()


def test_nodes_that_never_tell_lengths() -> None:
    cluster = Cluster()
    for second in range(20):
        cluster.second(second, n0=((), 1))
    assert cluster.of_what_ended()


def test_a_node_that_stops_telling_lengths() -> None:
    cluster = Cluster()
    for second in range(20):
        cluster.second(second, n0=(LONG if second < 13 else (), 1))
    assert cluster.of_what_ended()


def test_a_node_that_comes_with_requests_under_way() -> None:
    cluster = Cluster()
    for second in range(20):
        cluster.second(second, **({"n0": (LONG, 1)} if second < 13 else {"n0": (LONG, 1), "n1": (LONG, 1)}))
    assert cluster.of_what_ended()


def test_an_engine_that_was_started_anew() -> None:
    cluster = Cluster()
    for second in range(20):
        cluster.second(second, n0=(LONG, 1) if second < 13 else ((0, 20), 2))
    assert cluster.of_what_ended()


def test_recent_work_is_of_what_ended_while_the_open_slice_goes_on() -> None:
    cluster = Cluster()
    for second in range(17):
        cluster.second(second, n0=(LONG, 1))
    workload, _ = cluster.windows.recent(17.0)
    assert workload is not None
    assert (workload.t_uc, workload.t_out) == (400.0, 300.0)
    for second in range(17, 30):
        cluster.second(second, n0=(LONG, 1))
    cluster.windows.iterations(computed())
    workload, _ = cluster.windows.recent(29.0)
    assert workload is not None
    assert (workload.t_uc, workload.t_out) == (400.0, 300.0)


def test_work_of_what_began_can_be_sent() -> None:
    cluster = Cluster()
    for second in range(21):
        cluster.second(second, n0=(LONG, 1))
    workload = cluster.windows.latest(1)[0].workload
    assert workload is not None
    assert {type(value) for value in map(workload.__getattribute__, Workload.__struct_fields__)} == {float}
    msgspec.json.encode(workload)
