"""Settings of the planner that could decide nothing, or something that is no number, are refused by name."""

from pathlib import Path

import pytest

from services.planner.settings import PlannerServiceSettings
from services.settings import SettingsError, load


@pytest.mark.parametrize(
    "text",
    [
        "slice_s = nan",
        "slice_s = 0.0",
        "node_timeout_s = nan",
        "max_gap_s = inf",
        "switch_timeout_s = nan",
        "settle_s = -1.0",
        "settle_s = nan",
        "slices = 1\n[decide]\nearly_slices = 0",
        "initial_split = '0P3D'",
        "[decide]\ncooldown_s = nan",
        "[decide]\ncooldown_s = -5.0",
        "[decide]\nlatency_weight = inf",
        "[decide]\ntarget_weight = inf",
        "[decide]\nstderrs = inf",
        "[decide]\nearly_slices = 1",
        "[model]\nwarm_up_least_s = nan",
        "[model]\nexperts = -2",
        "[model]\nknee_tokens = [-1]",
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "planner.toml"
    path.write_text(text)
    key = text.splitlines()[-1].partition(" ")[0] if "slices = 1\n" not in text else "slices"
    with pytest.raises(SettingsError, match=key):
        load(PlannerServiceSettings, path, {})


@pytest.mark.parametrize("text", ["", "slices = 2\n[decide]\nearly_slices = 0", "[decide]\ncooldown_s = 0.0"])
def test_what_works_is_taken(tmp_path: Path, text: str) -> None:
    path = tmp_path / "planner.toml"
    path.write_text(text)
    load(PlannerServiceSettings, path, {}).policy()
