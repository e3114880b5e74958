"""Our attention for CPUs is upstream's function, computed over fewer rows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.engine.sglang.config import PluginConfig, SglangSettings
from services.engine.sglang.launch import environment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
SCRIPT = Path(__file__).with_name("sglang_attention.py")


def test_attention_over_new_rows_equals_upstreams_on_random_tensors(tmp_path: Path) -> None:
    plugin = PluginConfig(plain=True, device="cpu", channel="")
    environ = environment(SglangSettings(), plugin, tmp_path, os.environ)
    environ["PYTHONPATH"] += os.pathsep + str(Path.cwd())
    done = subprocess.run([sys.executable, SCRIPT], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    differences = json.loads(done.stdout.splitlines()[-1])
    assert set(differences) == {"cold", "one_new_token", "chunk_after_cache", "mixed_batch", "window", "not_causal"}
    assert differences["cold"] == differences["window"] == differences["not_causal"] == 0, "the same code runs there"
    assert max(differences.values()) < 2e-6, differences
