"""Our block key and SGLang's storage hash are one function: the published vectors, hashed by SGLang itself."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.unit.test_block_key import VECTORS, sequence

ROOT = Path(__file__).parents[2]
STUBS = ROOT / "services" / "engine" / "sglang" / "cpu_stubs"


@pytest.mark.e2e
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("sglang") is None, reason="needs the [engine] extra: pip install -e .[engine]")
def test_sglang_hashes_the_vectors_to_the_same_keys() -> None:
    cases = [case | {"tokens": case["tokens"] or sequence(case["sequence"])} for case in VECTORS]
    environ = os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": f"{STUBS}{os.pathsep}{ROOT}"}
    answer = subprocess.run(
        [sys.executable, "-m", "tests.e2e.sglang_page_hashes"],
        input=json.dumps(cases),
        env=environ,
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-2000:]
    hashes = json.loads(answer.stdout.splitlines()[-1])
    assert [len(found) for found in hashes] == [case["blocks"] for case in VECTORS]
    assert [found[:3] for found in hashes] == [case["first_digests"] for case in VECTORS]
    assert [found[-1:] for found in hashes] == [case["last_digest"] for case in VECTORS]
