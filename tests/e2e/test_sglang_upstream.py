"""Where our code stands beside SGLang's, it does what SGLang's does."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.engine.sglang.config import PluginConfig, SglangSettings
from services.engine.sglang.launch import environment
from tests.e2e.sglang_needed import NEEDS_SGLANG

pytestmark = [NEEDS_SGLANG, pytest.mark.e2e, pytest.mark.timeout(600)]
SCRIPT = Path(__file__).with_name("sglang_upstream.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    plugin = PluginConfig(plain=True, device="cpu", channel="")
    environ = environment(SglangSettings(), plugin, tmp_path_factory.mktemp("upstream"), os.environ)
    environ["PYTHONPATH"] += os.pathsep + str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, SCRIPT], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_attention_over_new_rows_equals_upstreams(found: dict[str, Any]) -> None:
    differences = found["attention"]
    assert len(differences) == 6
    assert differences["cold"] == differences["window"] == differences["not_causal"] == 0, "the same code runs there"
    assert max(differences.values()) < 2e-6, differences


def test_a_block_survives_the_way_through_host_memory(found: dict[str, Any]) -> None:
    assert found["block_survives"] == [True, True]


def test_case_15_a_pool_with_pieces_that_blocks_do_not_hold_is_refused_by_name(found: dict[str, Any]) -> None:
    assert "WindowedPool" in found["refusal"]


def test_every_internal_name_is_there(found: dict[str, Any]) -> None:
    assert found["missing_names"] == ""
