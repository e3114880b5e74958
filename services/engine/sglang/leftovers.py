"""What engines leave behind when their service and they are killed: our own folders and SGLang's shared memory."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "ei-sglang-"
"""Folders of engines are called <PREFIX><pid of the service>-<anything>."""
SHARED = Path("/dev/shm")
_LOADS = "sglang_loads_*.shm"
_STAMPED = "sgl_shm_*"
_YOUNG_S = 60.0


def sweep(folder: Path, shared: Path = SHARED) -> None:
    """Remove folders of dead services below `folder`, and what dead engines of ours left in shared memory."""
    for leftover in folder.glob(f"{PREFIX}*"):
        if _is_dead(leftover.name.removeprefix(PREFIX).split("-")[0]):
            shutil.rmtree(leftover, ignore_errors=True)
    for path in (*_of_dead_creators(shared), *_unmapped_snapshots(shared)):
        path.unlink(missing_ok=True)


def _is_dead(pid: str) -> bool:
    return pid.isdigit() and not Path(f"/proc/{pid}").exists()


def _is_ours(path: Path, older_s: float = 0.0) -> bool:
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    return status.st_uid == os.getuid() and time.time() - status.st_mtime >= older_s


def _of_dead_creators(shared: Path) -> Iterator[Path]:
    """Message queues between ranks; SGLang names them sgl_shm_<kind>_<pid>_<random>."""
    for path in shared.glob(_STAMPED):
        parts = path.name.split("_")
        if len(parts) >= 5 and _is_dead(parts[-2]) and _is_ours(path):
            yield path


def _unmapped_snapshots(shared: Path) -> list[Path]:
    """Load snapshots carry no pid: one that no process maps, and that is not just being made, is nobody's."""
    old = [path for path in shared.glob(_LOADS) if _is_ours(path, _YOUNG_S)]
    if not old:
        return []
    mapped = "".join(_maps_of(process) for process in Path("/proc").glob("[0-9]*"))
    return [path for path in old if str(path) not in mapped]


def _maps_of(process: Path) -> str:
    try:
        return (process / "maps").read_text(errors="replace")
    except OSError:
        return ""  # it has ended, or is not ours
