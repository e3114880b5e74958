"""A scenario file (TOML): cluster, workloads, times. And one run of it with one system."""

import gc
import os
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from schemas.codec import Seconds, SmallCount
from schemas.phase import Split
from services.simulator.agents import Agents, Mix
from services.simulator.hardware import PROFILES, Hardware
from services.simulator.record import Recorder
from services.simulator.report import figures, off_best_pct, over_time, prefill_use, scored, shares, switching
from services.simulator.systems.catalogue import SYSTEMS
from services.simulator.trace import load_trace
from services.simulator.world import World

Above = Annotated[float, Meta(gt=0, le=1e9)]


class ScenarioError(Exception):
    """A scenario that cannot be run; the text names file, field and what was expected."""


class Work(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Agents that play one trace: `agents` at a time, or `per_minute` new ones, in [since_s, until_s).

    `resize`: (when, how many agents from then on), in seconds; those beyond end as they finish. `trace`: file name
    below the trace folder. `max_pause_s` caps pauses, `output_scale` multiplies answers, `media`:
    every request carries a picture (`media_s` of the scenario).
    """

    trace: str
    agents: SmallCount = 0
    per_minute: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    max_pause_s: Seconds | None = None
    output_scale: Above = 1.0
    media: bool = False
    since_s: Seconds = 0.0
    until_s: Seconds | None = None
    ramp_s: Seconds | None = None
    resize: list[tuple[Seconds, SmallCount]] = []


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`media_s`: prefill time of a request with a picture beyond its tokens (c4). `split`: at the start.

    `midway`: the first agents begin anywhere in their work.
    `periods_s`: parts of the run that get figures of their own, as (from, to).
    """

    name: str
    hardware: str
    split: str
    work: Annotated[list[Work], Meta(min_length=1)]
    warm_up_s: Seconds = 1800.0
    scored_s: Above = 3600.0
    media_s: Seconds = 0.0
    ramp_s: Seconds = 600.0
    midway: bool = False
    periods_s: list[tuple[float, float]] = []

    @property
    def ends_s(self) -> float:
        return self.warm_up_s + self.scored_s

    def start(self) -> Split:
        """The split at the start, which has a node of each phase."""
        try:
            split = Split.parse(self.split)
        except ValueError as error:
            raise ScenarioError(f"{self.name}: {error}") from error
        if not (split.prefill and split.decode):
            raise ScenarioError(f"{self.name}: split {self.split!r} leaves a phase without a node")
        return split

    def profile(self) -> Hardware:
        """The hardware, with what this scenario adds to its times."""
        known = PROFILES.get(self.hardware)
        if known is None:
            raise ScenarioError(f"{self.name}: hardware {self.hardware!r} is none of {', '.join(PROFILES)}")
        return replace(known, times=replace(known.times, c4=self.media_s)) if self.media_s else known


def read_scenario(path: Path) -> Scenario:
    """Read a scenario file; ScenarioError names what is wrong."""
    try:
        return msgspec.convert(tomllib.loads(path.read_text()), Scenario)
    except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ScenarioError(f"{path}: {error}") from error


def trace_folder() -> Path:
    """Where traces lie: `EI_TRACES`, else those that ship with the project."""
    return Path(os.environ.get("EI_TRACES", "data/traces"))


@dataclass(frozen=True, slots=True)
class Run:
    """One finished run. `row` has the figures, `cpu_s` what it cost here."""

    row: dict[str, Any]
    timeline: list[dict[str, Any]]
    decisions: list[dict[str, Any]]
    switches: list[dict[str, Any]]
    recorder: Recorder
    cpu_s: float


def simulate(
    scenario: Scenario, system_id: str, *, seed: int = 1, slices: bool = False, best: str | None = None
) -> Run:
    """Run a scenario with one system. `best`: the best static split, where it is known."""
    if system_id not in SYSTEMS:
        raise ScenarioError(f"system {system_id!r} is none of {', '.join(SYSTEMS)}")
    traces = {work.trace: load_trace((trace_folder() / work.trace).resolve()) for work in scenario.work}
    began = time.process_time()
    system = SYSTEMS[system_id]()
    recorder = Recorder(slices=slices)
    world = World(scenario.profile(), scenario.start(), system, seed=seed, watch=recorder)
    agents = Agents(world.agenda, world.arrive, seed)
    world.finished = agents.answered
    for work in scenario.work:
        mix = Mix(
            trace=traces[work.trace],
            agents=work.agents,
            per_minute=work.per_minute,
            max_pause_s=work.max_pause_s,
            output_scale=work.output_scale,
            media=work.media,
            since=work.since_s,
            ramp_s=scenario.ramp_s if work.ramp_s is None else work.ramp_s,
            midway=scenario.midway,
        )
        resize = agents.add(mix)
        if work.until_s is not None:
            world.agenda.at(work.until_s, _sized(resize, 0))
        for at_s, count in work.resize:
            world.agenda.at(at_s, _sized(resize, count))
    recorder.follow(world)
    with _few_collections():
        world.agenda.run(scenario.ends_s)
    cpu_s = time.process_time() - began
    since, until = scenario.warm_up_s, scenario.ends_s
    split_shares = shares(recorder.samples, since, until)
    sessions = sum(since <= end < until for _, end in agents.sessions)
    row = {
        "workload": scenario.name,
        "agents": sum(work.agents for work in scenario.work),
        "system": system_id,
        **figures(scored(recorder.calls, since, until), world.block_tokens, scenario.scored_s),
        **prefill_use(recorder.samples, since, until),
        **switching(world.switches),
        "off_best_pct": off_best_pct(split_shares, best),
        "sessions_per_h": sessions * 3600 / scenario.scored_s,
        "split": world.split,
        "splits": split_shares,
        "seed": seed,
        "periods": [
            figures(scored(recorder.calls, start, end), world.block_tokens, end - start)
            for start, end in scenario.periods_s
        ],
    }
    decisions = [
        {"at_s": at, "kind": said.kind, "from": said.split_now, "to": said.split_new, "why": said.why}
        for at, said in getattr(getattr(system, "planner", None), "decisions", [])
    ]
    switches = [
        {"at_s": s.started_at, "from": s.before, "to": s.after, "ended_s": s.ended_at, "reason": s.reason}
        for s in world.switches
    ]
    return Run(row, over_time(recorder.calls, recorder.samples), decisions, switches, recorder, cpu_s)


def _sized(resize: Callable[[int], None], agents: int) -> Callable[[float], None]:
    return lambda now: resize(agents)


@contextmanager
def _few_collections() -> Iterator[None]:
    """A run keeps many objects and makes few cycles: garbage is looked for seldom."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
