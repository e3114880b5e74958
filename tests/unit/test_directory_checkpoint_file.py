"""A checkpoint that cannot be written costs itself alone: the last one stands, and the directory goes on."""

import io
import json
import os
from pathlib import Path

from directory_bench import Bench
from prometheus_client import CollectorRegistry

from schemas.branch import BranchEventType
from services.clock import SystemClock
from services.directory.checkpoints import Checkpoints, read
from services.directory.metrics import DirectoryMetrics
from services.observe import Metrics, logger


async def test_one_that_cannot_be_written_leaves_the_last_one_and_is_counted(tmp_path: Path) -> None:
    bench, registry, said = Bench(), CollectorRegistry(), io.StringIO()
    metrics = DirectoryMetrics(Metrics("directory", registry), bench.core)
    log = logger("directory", stream=said)
    checkpoints = Checkpoints(str(tmp_path), "p0", bench.core, SystemClock(), metrics, log)
    bench.tell("b", BranchEventType.OPEN, version=3)
    await checkpoints.save(lambda: 1)
    branch = bench.core.branches.get(("", "b"))
    assert branch is not None
    branch.version = 2**64
    await checkpoints.save(lambda: 2)
    assert registry.get_sample_value("ei_directory_checkpoint_failures_total") == 1
    logged = json.loads(said.getvalue())
    assert (logged["event"], logged["level"]) == ("checkpoint_not_written", "error")
    assert "OverflowError" in logged["error"]
    assert os.listdir(tmp_path) == ["directory-p0.msgpack"]
    (part,) = read(tmp_path / "directory-p0.msgpack")
    assert part.end is not None
    assert (part.end.sequence, part.branches[0].version) == (1, 3)
    branch.version = 4
    await checkpoints.save(lambda: 3)
    (part,) = read(tmp_path / "directory-p0.msgpack")
    assert part.branches[0].version == 4
