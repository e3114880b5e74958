"""Scenarios and options that cannot be run are refused by name, before anything runs."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli.main import app

WORK = '[[work]]\ntrace = "cc_smoke.btrace.jsonl.gz"\nagents = 2\n'


def scenario(folder: Path, text: str) -> Path:
    path = folder / "wrong.toml"
    defaults = {"name": '"x"', "hardware": '"glm-5.2/gb300"', "split": '"1P1D"', "warm_up_s": "5.0", "scored_s": "20.0"}
    head = "".join(f"{key} = {value}\n" for key, value in defaults.items() if f"{key} =" not in text)
    path.write_text(head + text)
    return path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('split = "0P2D"\n' + WORK, "split '0P2D' leaves a phase without a node"),
        ('split = "0P0D"\n' + WORK, "leaves a phase without a node"),
        ("warm_up_s = nan\n" + WORK, "warm_up_s"),
        ("scored_s = inf\n" + WORK, "scored_s"),
        ("scored_s = 0.0\n" + WORK, "scored_s"),
        ("ramp_s = -5.0\n" + WORK, "ramp_s"),
        ("media_s = -5.0\n" + WORK, "media_s"),
        ("work = []\n", "work"),
        (WORK + "per_minute = -1.0\n", "per_minute"),
        (WORK + "output_scale = 0.0\n", "output_scale"),
        (WORK + "max_pause_s = -3.0\n", "max_pause_s"),
        (WORK + "resize = [[3.0, -4]]\n", "resize"),
    ],
)
def test_a_scenario_that_cannot_be_run(tmp_path: Path, text: str, said: str) -> None:
    found = CliRunner().invoke(app, ["simulate", str(scenario(tmp_path, text)), "--system", "static"])
    assert found.exit_code == 1, found.output
    assert isinstance(found.exception, SystemExit), found.exception
    assert said in " ".join(found.output.split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--split", "9P0D"], "leaves a phase without a node"),
        (["--scored", "inf"], "scored_s"),
        (["--json", "/nonexistent/run.json"], "there is no folder"),
        (["--record", "/nonexistent/run.json.gz"], "there is no folder"),
    ],
)
def test_options_that_cannot_be_met(tmp_path: Path, options: list[str], said: str) -> None:
    path = str(scenario(tmp_path, WORK))
    found = CliRunner().invoke(app, ["simulate", path, "--system", "static", *options])
    assert found.exit_code == 1, found.output
    assert isinstance(found.exception, SystemExit), found.exception
    assert said in " ".join(found.output.split())
