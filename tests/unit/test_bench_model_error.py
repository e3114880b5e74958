"""The bench of model errors: its tables, its draw, and that it notices a wrong model."""

import msgspec
import pytest

from bench.model_error import CONDITIONS, WORKLOADS, result
from bench.model_error_silicon import Probe, WarmUp, learn, load
from services.planner.core.options import ModelSettings


def test_a_minute_of_warm_up_predicts_kimi_and_a_wrong_model_is_told_apart() -> None:
    tables, requests = load()
    agents, pause_s = CONDITIONS["osworld"]
    warm_up = WarmUp(tables["kimi"], requests["osworld"], agents, pause_s, seed=3)
    *_, (_, model) = learn(warm_up, "kimi", 60.0, ModelSettings())
    probe = Probe(tables["kimi"], requests["osworld"], 40, seed=1)
    found = probe.errors(model)
    assert found.single < 7.0
    assert found.batch < 7.0
    slower = probe.errors(msgspec.structs.replace(model, c1=2 * model.c1, d0=2 * model.d0))
    assert slower.single > found.single + 5.0


def test_requests_stay_within_the_tables() -> None:
    _, requests = load()
    assert set(requests) == {name for names in WORKLOADS.values() for name in names}
    assert all(len(found) == 1500 and max(cached for _, cached, _ in found) <= 196_608 for found in requests.values())


def test_the_line_has_the_promised_keys() -> None:
    sources = [
        {"name": f"{name}, optional terms", "single_pct": 1.0, "batch_pct": 2.0, "seconds_to_7_pct": None}
        for name in ("Kimi-K2.6-NVFP4 GB300 table", "GLM-5.2-NVFP4 GB300 table")
    ]
    line = result(sources, quick=True)
    keys = ("kimi_single_pct", "kimi_batch_pct", "kimi_seconds_to_7_pct", "glm_single_pct", "glm_batch_pct")
    assert [line[key] for key in keys] == [1.0, 2.0, None, 1.0, 2.0]
    assert line["sources"] == sources
    with pytest.raises(StopIteration):
        result([], quick=True)
