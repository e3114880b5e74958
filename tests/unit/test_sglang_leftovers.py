"""What is swept up after dead engines, and what is left alone."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

from services.engine.sglang.leftovers import PREFIX, sweep


def _dead_pid() -> int:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def _old(path: Path) -> Path:
    path.write_bytes(b"x" * 4096)
    os.utime(path, (0, 0))
    return path


def test_only_what_nobody_uses_goes(tmp_path: Path) -> None:
    folder, shared = tmp_path / "run", tmp_path / "shm"
    folder.mkdir()
    shared.mkdir()
    dead = _dead_pid()
    gone = [folder / f"{PREFIX}{dead}-abc", folder / f"{PREFIX}{os.getpid()}-abc", folder / "other"]
    for path in gone:
        path.mkdir()
    mapped, unmapped = _old(shared / "sglang_loads_a.shm"), _old(shared / "sglang_loads_b.shm")
    young = shared / "sglang_loads_c.shm"
    young.write_bytes(b"x")
    orphan, owned = shared / f"sgl_shm_mq_{dead}_1a2b", shared / f"sgl_shm_mq_{os.getpid()}_1a2b"
    for path in (orphan, owned, shared / "sgl_shm_odd", shared / "else"):
        path.write_bytes(b"x")
    with mapped.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        sweep(folder, shared)
    assert sorted(path.name for path in folder.iterdir()) == sorted([f"{PREFIX}{os.getpid()}-abc", "other"])
    kept = {mapped.name, young.name, owned.name, "sgl_shm_odd", "else"}
    assert {path.name for path in shared.iterdir()} == kept
    assert not unmapped.exists()
