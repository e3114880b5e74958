"""What engines leave behind when their service and they are killed: our own folders and SGLang's shared memory."""

import os
import shutil
import time
from pathlib import Path

PREFIX = "ei-sglang-"
"""Folders of engines are called <PREFIX><pid of the service>-<anything>."""
_SHARED = Path("/dev/shm")
_LOADS = "sglang_loads_*.shm"
_YOUNG_S = 60.0


def sweep(folder: Path) -> None:
    """Remove folders of dead services below `folder`, and load snapshots of SGLang that no process maps."""
    for leftover in folder.glob(f"{PREFIX}*"):
        pid = leftover.name.removeprefix(PREFIX).split("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(leftover, ignore_errors=True)
    for snapshot in _unused_snapshots():
        snapshot.unlink(missing_ok=True)


def _unused_snapshots() -> list[Path]:
    old = [path for path in _SHARED.glob(_LOADS) if _is_old_and_ours(path)]
    if not old:
        return []
    mapped = "".join(_maps_of(process) for process in Path("/proc").glob("[0-9]*"))
    return [path for path in old if str(path) not in mapped]


def _is_old_and_ours(path: Path) -> bool:
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    return status.st_uid == os.getuid() and time.time() - status.st_mtime > _YOUNG_S


def _maps_of(process: Path) -> str:
    try:
        return (process / "maps").read_text(errors="replace")
    except OSError:
        return ""  # it has ended, or is not ours
