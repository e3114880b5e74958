"""How long decisions over many nodes take: `python -m bench.decisions [--quick] [--json FILE]`.

`route_us`: placing one request of 150,000 tokens, its prefix in three pieces at peers, 120 requests open, over 64
nodes: predicted time to first token on all, choice, plan of fetches, and the decode node. `planner_ms`: a decision of
the planner over a window of ten slices and all 63 splits of 64 nodes. CPU time of this process, so that other work does
not count; the median and the least of many.
"""

import argparse
import copy
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from schemas.directory import MatchReply, NodeMatch, Piece
from schemas.iteration_model import IterationModel
from schemas.kv import Capacities, NodeHello
from schemas.phase import Phase
from schemas.telemetry import LENGTH_CLASSES, KvUse, NodeTelemetry, RequestTelemetry, TierUse
from services.planner.core.decide import Situation, choose
from services.planner.core.demand import Demand
from services.planner.core.fleet import Node
from services.planner.core.options import DecideSettings
from services.planner.core.throughput import NodeLimits
from services.planner.core.windows import Slice, SliceKind
from services.router.core.load import Booking, Ledger
from services.router.core.nodes import Nodes
from services.router.core.placement import FetchCost, Prompt
from services.router.core.placer import Placer
from services.router.core.timing import Coefficients

NODES, SPLIT, BLOCK, TOKENS = 64, 30, 64, 150_000
ROUTE_US, PLANNER_MS = 200.0, 50.0
POOL = 20_000_000


def names() -> list[str]:
    return [f"node-{number}" for number in range(NODES)]


def placer() -> Placer:
    """64 nodes that run both phases, 120 requests on them."""
    nodes, ledger = Nodes(3.0), Ledger(order_weight=2.0)
    made = Placer(
        nodes, ledger, Coefficients(uncached_per_iteration=6000.0), FetchCost(2.3e6, 0.002), FetchCost(2e6, 0.0)
    )
    for name in names():
        nodes.on_hello(_hello(name), 0.0)
        nodes.on_telemetry(_beat(name), 0.0)
        made.changed(name)
    draw = random.Random(1)
    for number in range(120):
        node, other = draw.choice(names()), draw.choice(names())
        legs = [Booking(Phase.PREFILL, node, 0.4, 0, None, 0.0), Booking(Phase.DECODE, other, 0.0, TOKENS)]
        ledger.set(str(number), legs)
    return made


def route() -> Callable[[int], None]:
    """One placement, as the router's core makes it."""
    made, everyone = placer(), names()
    nodes = [NodeMatch(node=name, l1_blocks=300, l2_blocks=300) for name in everyone[:40]]
    pieces = [
        Piece(first=0, last=300, nodes=everyone[:40]),
        Piece(first=300, last=2200, nodes=everyone[40:42]),
        Piece(first=2200, last=2300, nodes=everyone[50:51]),
    ]
    match = MatchReply(blocks=2300, known_blocks=2300, pieces=pieces, nodes=nodes)

    def once(turn: int) -> None:
        prompt = Prompt(TOKENS, BLOCK, copy.copy(match))
        best = made.predict(prompt, made.serving(Phase.PREFILL, (), 1.0), 1.0).best(turn)
        made.choose_decode(prompt.match, TOKENS, made.serving(Phase.DECODE, (), 1.0), best.node, turn)

    return once


def decide() -> Callable[[int], None]:
    """One decision, as the planner's core makes it at the end of a window."""
    draw = random.Random(2)
    model = IterationModel(
        node="",
        c0=0.1,
        c1=3.4e-5,
        c2=2.35e-10,
        c3=2e-7,
        d0=0.006,
        d1=0.013,
        d2=0.0004,
        d3=0.001,
        experts_per_token=8,
        experts=256,
        fed_tokens=4.0,
        uncached_per_iteration=6000.0,
        restored_share=0.8,
        prefill_windows=60,
        decode_windows=60,
        frozen=True,
    )
    nodes = [
        Node(
            name,
            Phase.PREFILL if at < SPLIT else Phase.DECODE,
            0,
            1,
            1,
            draw.randint(0, 20),
            1,
            draw.randint(0, POOL),
            0.0,
        )
        for at, name in enumerate(sorted(names()))
    ]
    slices = [_slice(draw, start * 60.0) for start in range(10)]
    models = dict.fromkeys(names(), model)
    limits = {name: NodeLimits(8192, 256, 2_900_000) for name in names()}
    situation = Situation(nodes, models, limits, frozenset({"node-0", "node-9"}), slices, 60.0)
    settings = DecideSettings()

    def once(_: int) -> None:
        choose(situation, settings)

    return once


def _slice(draw: random.Random, start: float) -> Slice:
    demand = Demand(decode_steps=1000, accepted=2500)
    for number in range(2000):
        uncached = max(64, round(5000 * draw.gammavariate(1, 1)))
        arrived = start + number * 0.03
        demand.add(
            RequestTelemetry(
                id="",
                t=0.0,
                request="",
                branch=None,
                version=None,
                outcome="stop",
                t_arrive=arrived,
                t_end=arrived + 8.0,
                uncached_tokens=uncached,
                cached_tokens=150_000,
                output_tokens=850,
            ),
            13.0,
        )
    demand.starts.iterated(2000 * 5000, 2000 * 7.5e8, 0)
    demand.starts.ran(np.zeros(LENGTH_CLASSES), np.zeros(LENGTH_CLASSES))
    q = draw.uniform(180, 220)
    return Slice(start, SliceKind.KNOWN, demand.requests, demand.workload(), q, in_flight=1.1 * q, demand=demand)


def _hello(name: str) -> NodeHello:
    return NodeHello(
        node=name,
        incarnation=1,
        engine_incarnation=1,
        model="m",
        block_size=BLOCK,
        key_version="1",
        ranks=4,
        engine="timed",
        dtype="fp8",
        capacities=Capacities(l1_tokens=2_900_000, l2_tokens=POOL, running=256),
        transfer="",
    )


def _beat(name: str) -> NodeTelemetry:
    use = TierUse(used=POOL - 100_000, total=POOL, referenced=POOL // 2)
    return NodeTelemetry(
        node=name,
        t=0.0,
        incarnation=1,
        phase=Phase.BOTH,
        epoch=0,
        waiting=0,
        running=0,
        kv=KvUse(l1=use, l2=use),
        last_kv_seq=0,
    )


def measure(once: Callable[[int], None], times: int) -> tuple[float, float]:
    """(median, least) CPU seconds of one call."""
    taken = []
    for turn in range(times):
        begun = time.process_time_ns()
        once(turn)
        taken.append((time.process_time_ns() - begun) / 1e9)
    return statistics.median(taken), min(taken)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.decisions", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    route_s, least_route_s = measure(route(), 500 if options.quick else 5000)
    planner_s, least_planner_s = measure(decide(), 20 if options.quick else 200)
    line: dict[str, Any] = {
        "bench": "decisions",
        "quick": options.quick,
        "nodes": NODES,
        "route_us": route_s * 1e6,
        "route_least_us": least_route_s * 1e6,
        "planner_ms": planner_s * 1e3,
        "planner_least_ms": least_planner_s * 1e3,
    }
    for name, value, bound in (
        ("route_us", line["route_us"], ROUTE_US),
        ("planner_ms", line["planner_ms"], PLANNER_MS),
    ):
        print(f"{name:12} {value:8.1f}  bound {bound:g}  {'met' if value <= bound else 'MISSED'}")
    if options.json is not None:
        options.json.write_text(json.dumps(line) + "\n")
    print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
