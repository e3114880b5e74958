"""What remains of an engine when its service is killed: nothing."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from services.engine.sglang.config import SglangSettings
from services.engine.sglang.leftovers import sweep
from services.engine.sglang.plain import PlainEngine
from services.engine.sglang.process import EngineFailed
from tests.e2e.sglang_needed import NEEDS_SGLANG

pytestmark = [NEEDS_SGLANG, pytest.mark.e2e, pytest.mark.timeout(300)]
SCRIPT = Path(__file__).with_name("sglang_service.py")


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    environ = os.environ | {"PYTHONPATH": str(Path.cwd())}
    process = await asyncio.create_subprocess_exec(
        sys.executable, SCRIPT, tmp_path, env=environ, stdout=asyncio.subprocess.PIPE
    )
    yield process
    if process.returncode is None:
        process.kill()
        await process.wait()


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def _gone(processes: list[psutil.Process], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes):
            return True
        await asyncio.sleep(0.1)
    return False


async def test_a_killed_service_takes_sglang_with_it_and_the_next_one_sweeps(
    service: asyncio.subprocess.Process, tmp_path: Path
) -> None:
    assert service.stdout is not None
    line = await asyncio.wait_for(service.stdout.readline(), 240)
    assert line.startswith(b"ready ")
    family = psutil.Process(service.pid).children(recursive=True)
    names = [process.name() for process in family]
    assert any("scheduler" in name for name in names), names
    assert len(_entries(tmp_path)) == 1

    service.send_signal(signal.SIGKILL)
    await service.wait()
    assert await _gone(family, within_s=10), [process for process in family if process.is_running()]
    sweep(tmp_path)
    assert _entries(tmp_path) == []


async def test_an_engine_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    model = tmp_path / "no-model"
    model.mkdir()
    settings = SglangSettings(model_path=str(model), sglang_args={"load_format": "dummy"})
    engine = PlainEngine(settings, folder=tmp_path)
    with pytest.raises(EngineFailed, match=r"(?s)SGLang.*no-model"):
        await engine.start()
    assert _entries(tmp_path) == [model]
    assert psutil.Process().children(recursive=True) == []
