"""The search for the best static split, what is published of a run, and that a finished run is not repeated."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import stationary, stationary_runs
from bench.stationary_reported import AGENTS, KNOWN_SPLITS, SYSTEMS
from bench.stationary_runs import Job, best_split, kept_at, run_job

RATE = {1: 4.0, 2: 7.5, 3: 8.0, 4: 7.9, 5: 6.0, 6: 5.0, 7: 4.0, 8: 3.0}


@pytest.mark.parametrize("start", ["1P8D", "3P6D", "8P1D"])
def test_the_search_climbs_to_the_top_and_tries_both_neighbours(start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def measured(jobs: Sequence[Job], workers: int) -> list[dict[str, Any]]:
        counts = [int((job.split or "").split("P")[0]) for job in jobs]
        asked.extend(counts)
        return [{"throughput_rps": RATE[count], "start": job.split} for count, job in zip(counts, jobs, strict=True)]

    monkeypatch.setattr(stationary_runs, "run_all", measured)
    found, tried = best_split(Job("claude-code", "static", 90), start, 9, 1)
    assert found == "3P6D"
    assert {2, 3, 4} <= set(asked)
    assert len(asked) == len(set(asked)) == len(tried)


def test_a_finished_run_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "synth_cc.btrace.jsonl.gz").write_bytes(b"a trace")
    monkeypatch.setenv("EI_TRACES", str(tmp_path))
    monkeypatch.setattr(stationary_runs, "KEPT", tmp_path / "kept")
    job = Job("claude-code", "ours", 126, seed=2)
    assert kept_at(job) != kept_at(Job("claude-code", "ours", 126, seed=3))
    kept_at(job).parent.mkdir()
    kept_at(job).write_text(json.dumps({"throughput_rps": 1.5}))
    assert run_job(job) == {"throughput_rps": 1.5}


def test_rows_have_every_key_of_the_contract() -> None:
    row = stationary.trimmed({})
    assert {"workload", "agents", "system", "most_loaded_over_average", "off_best_pct", "sessions_per_h"} <= row.keys()
    assert len(stationary.KEYS) == 21


def test_nine_runs_were_reported_for_both_systems() -> None:
    runs = [(workload, agents) for workload, many in AGENTS.items() for agents in many]
    assert len(runs) == 9
    assert {(*run, system) for run in runs for system in ("dynamo-1.5.1", "reference")} == set(SYSTEMS)
    assert {key[:2] for key in KNOWN_SPLITS} <= set(runs)
