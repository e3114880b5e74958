"""Runs of the simulator for benches: in parallel, each kept under the hash of all it depends on and not repeated."""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from services.simulator.scenario import Scenario, read_scenario, simulate, trace_folder

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
KEPT = Path(".cache/simulator")
SOURCES = (
    "schemas",
    "services/simulator",
    *(f"services/{name}/core" for name in ("engine", "router", "directory", "kvpool", "planner")),
)


@dataclass(frozen=True, slots=True)
class Job:
    """One run. None: the scenario's own; `agents` and `per_minute` are those of its first work."""

    scenario: str
    system: str
    agents: int | None
    seed: int = 1
    split: str | None = None
    warm_up_s: float | None = None
    scored_s: float | None = None
    ramp_s: float | None = None
    per_minute: float | None = None
    hardware: str | None = None

    def resolved(self) -> Scenario:
        """The scenario of this run."""
        known = read_scenario(Path("bench/scenarios") / f"{self.scenario}.toml")
        first = known.work[0]
        if self.agents is not None:
            first = msgspec.structs.replace(first, agents=self.agents)
        if self.per_minute is not None:
            first = msgspec.structs.replace(first, agents=0, per_minute=self.per_minute)
        changes: dict[str, Any] = {"work": [first, *known.work[1:]]}
        for name in ("hardware", "split", "warm_up_s", "scored_s", "ramp_s"):
            if getattr(self, name) is not None:
                changes[name] = getattr(self, name)
        return msgspec.structs.replace(known, **changes)


@lru_cache(maxsize=1)
def sources_digest() -> str:
    """Of every source file a run depends on."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted(Path(folder).rglob("*.py")):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def kept_at(job: Job) -> Path:
    """Where the result of a run is kept."""
    scenario = job.resolved()
    digest = hashlib.sha256(sources_digest().encode())
    digest.update(msgspec.json.encode(scenario))
    digest.update(json.dumps(asdict(job), sort_keys=True).encode())
    for work in scenario.work:
        digest.update(hashlib.sha256((trace_folder() / work.trace).read_bytes()).digest())
    return KEPT / f"{digest.hexdigest()[:24]}.json"


def run_job(job: Job) -> dict[str, Any]:
    """The row of a run (with `timeline`, `decisions`, `switches_made`, `cpu_s`), out of the store if it is there."""
    path = kept_at(job)
    if path.exists():
        kept: dict[str, Any] = json.loads(path.read_text())
        return kept
    run = simulate(job.resolved(), job.system, seed=job.seed)
    result = {
        **run.row,
        "start": job.resolved().split,
        "timeline": run.timeline,
        "decisions": run.decisions,
        "switches_made": run.switches,
        "cpu_s": run.cpu_s,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(result))
    partial.replace(path)
    return result


def run_all(jobs: Sequence[Job], workers: int) -> list[dict[str, Any]]:
    """All of them, in the order given, on at most as many cores as there are; kept ones cost nothing."""
    used = min(workers, CORES, len(jobs))
    if used <= 1:
        return [run_job(job) for job in jobs]
    with ProcessPoolExecutor(used) as pool:
        return list(pool.map(run_job, jobs))


def best_split(job: Job, start: str, nodes: int, workers: int) -> tuple[str, list[dict[str, Any]]]:
    """The split of highest throughput for a system that never changes it, and every run made to find it.

    Throughput over the number of prefill nodes has one top: from `start` uphill, both neighbours tried.
    """
    tried: dict[int, dict[str, Any]] = {}

    def measure(prefills: Iterable[int]) -> None:
        fresh = [count for count in prefills if 0 < count < nodes and count not in tried]
        jobs = [_at(job, f"{count}P{nodes - count}D") for count in fresh]
        tried.update(zip(fresh, run_all(jobs, workers), strict=True))

    top = int(start.split("P")[0])
    while True:
        measure((top - 1, top, top + 1))
        near = [count for count in (top - 1, top, top + 1) if count in tried]
        best = max(near, key=lambda count: float(tried[count]["throughput_rps"]))
        if best == top:
            return f"{top}P{nodes - top}D", list(tried.values())
        top = best


def _at(job: Job, split: str) -> Job:
    return Job(**{**asdict(job), "split": split})
