"""What is run: cases of the comparison, each with what it is in Dynamo's replay and in our simulator."""

from collections.abc import Callable
from dataclasses import dataclass

from bench.peer_dynamo_ours import dynamo
from bench.peer_dynamo_replay import NO_PLANNER, OURS, THEIRS
from services.simulator.system import System
from services.simulator.systems.own import Own
from services.simulator.systems.variants import static_own

START = "6P3D"
STATIC, ADAPTING, SWAPPED = "same static split", "each adapts", "both planners in Dynamo's replay"


@dataclass(frozen=True, slots=True)
class Case:
    """One line on one or both sides. `host`: Dynamo's host tier. `replay`: the planner in Dynamo's replay, None where
    there is no such run; `system`: makes ours, None likewise."""

    part: str
    name: str
    split: str
    host: bool = False
    decode_shares: bool = True
    startup_s: float = 0.0
    replay: str | None = None
    system: Callable[[], System] | None = None


def _static(split: str, *, host: bool) -> Case:
    tier = "host tier" if host else "device only"
    return Case(
        STATIC,
        f"KV router, {tier}",
        split,
        host=host,
        decode_shares=False,
        replay=NO_PLANNER,
        system=lambda: dynamo(host=host, planner=False),
    )


def _adapting(startup_s: float, *, host: bool) -> Case:
    tier = "host tier" if host else "device only"
    return Case(
        ADAPTING,
        f"Dynamo planner + KV router, {tier}, start-up {startup_s:g} s",
        START,
        host=host,
        startup_s=startup_s,
        replay=THEIRS,
        system=lambda: dynamo(host=host, planner=True, startup_s=startup_s),
    )


def _swapped(startup_s: float, *, host: bool) -> Case:
    tier = "host tier" if host else "device only"
    name = f"our planner core, {tier}, start-up {startup_s:g} s"
    return Case(SWAPPED, name, START, host=host, startup_s=startup_s, replay=OURS)


def cases(*, quick: bool) -> list[Case]:
    """All of them, in the order of the table."""
    if quick:
        ours = Case(ADAPTING, "ours", START, system=Own)
        return [_static("4P5D", host=False), _adapting(0.0, host=False), ours, _swapped(0.0, host=False)]
    static = [_static("4P5D", host=False), _static("3P6D", host=True), _static(START, host=False)]
    runs = [(0.0, False), (680.0, False), (680.0, True)]
    adapting = [_adapting(startup_s, host=host) for startup_s, host in runs]
    fixed = Case(ADAPTING, "ours, no planner", "3P6D", system=static_own)
    ours = Case(ADAPTING, "ours", START, system=Own)
    return [*static, *adapting, fixed, ours, *(_swapped(startup_s, host=host) for startup_s, host in runs)]
