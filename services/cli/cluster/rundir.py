"""The run directory of a local cluster: who owns it, what it holds, how the remains of a dead run are swept."""

import fcntl
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import msgspec

from services.cli.cluster.process import signal_group, start_time

SHM = Path("/dev/shm")


class InUse(Exception):
    """Another cluster runs in this directory."""


class ProcessRecord(msgspec.Struct, frozen=True):
    """A started process group: its leader's pid and start time."""

    pid: int
    started: int


class ClusterState(msgspec.Struct, kw_only=True):
    """What other commands read: where the cluster answers, and whether it is ready.

    `nkey`: path of the operator's seed ("" without keys). `processes`: leader of each service by name.
    """

    pid: int
    started: int
    url: str
    nats_url: str
    nkey: str
    partition: str
    engine: str
    nodes: list[str]
    ready: bool = False
    ready_after_s: float | None = None
    processes: dict[str, ProcessRecord] = {}


def run_path(port: int) -> Path:
    """Where the cluster of this user on `port` lives."""
    return Path(tempfile.gettempdir()) / f"ei-{os.getuid()}-{port}"


def shm_prefix(port: int) -> str:
    """How the shared-memory files of that cluster begin."""
    return f"ei-{os.getuid()}-{port}-"


class RunDirectory:
    """Held by a file lock as long as the cluster runs; `take` sweeps what a killed run left."""

    def __init__(self, port: int) -> None:
        self.path = run_path(port)
        self.shm_prefix = shm_prefix(port)
        self._lock: int | None = None

    @property
    def lock_descriptor(self) -> int:
        """Children must close it: a lock held by an orphan would block the next run."""
        assert self._lock is not None
        return self._lock

    @property
    def state_path(self) -> Path:
        return self.path / "cluster.json"

    def place(self, name: str) -> Path:
        """A subdirectory, made on first use."""
        folder = self.path / name
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def arenas(self, total_bytes: int) -> Path:
        """Where arenas of so many bytes in all go: shared memory, or this directory when there is too little of it."""
        room = os.statvfs(SHM)
        return SHM if room.f_bavail * room.f_frsize >= total_bytes else self.place("arenas")

    def take(self) -> list[str]:
        """Lock the directory and empty it; returns what of an earlier run was swept. InUse names the owner."""
        lock_path = self.path.with_name(f"{self.path.name}.lock")
        self._lock = os.open(lock_path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            self._lock = None
            state = read_state(self.path)
            who = f"process {state.pid}" if state is not None else "another process"
            raise InUse(f"{who} runs a cluster in {self.path}; choose another --port") from None
        swept = self._sweep()
        self.path.mkdir(mode=0o700)
        return swept

    def write(self, state: ClusterState) -> None:
        """Publish the state in one step."""
        partial = self.state_path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(state)))
        partial.rename(self.state_path)

    def give_back(self) -> None:
        """Remove everything of this run and release the lock."""
        self._remove_files()
        if self._lock is not None:
            self.path.with_name(f"{self.path.name}.lock").unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    def _sweep(self) -> list[str]:
        """Kill the processes of a dead run that still live, and remove its files."""
        swept: list[str] = []
        state = read_state(self.path)
        for name, record in (state.processes if state is not None else {}).items():
            if start_time(record.pid) == record.started or _group_alive(record.pid, record.started):
                signal_group(record.pid, signal.SIGKILL)
                _await_end(record.pid)
                swept.append(f"process group {record.pid} ({name})")
        return swept + self._remove_files()

    def _remove_files(self) -> list[str]:
        removed = [str(path) for path in sorted(SHM.glob(f"{self.shm_prefix}*"))]
        for path in removed:
            Path(path).unlink(missing_ok=True)
        if self.path.exists():
            shutil.rmtree(self.path)
            removed.append(str(self.path))
        return removed


def read_state(path: Path) -> ClusterState | None:
    """The state of the cluster in `path`; None when there is none to read."""
    try:
        return msgspec.json.decode((path / "cluster.json").read_bytes(), type=ClusterState)
    except (OSError, msgspec.MsgspecError):
        return None


def _group_alive(pgid: int, started: int) -> bool:
    """Members of a group whose leader is gone: only processes of our user that started after it count."""
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return any(_in_group(pid, pgid, started) for pid in pids)


def _in_group(pid: int, pgid: int, started: int) -> bool:
    try:
        if os.getpgid(pid) != pgid or Path(f"/proc/{pid}").stat().st_uid != os.getuid():
            return False
    except (ProcessLookupError, FileNotFoundError):
        return False
    began = start_time(pid)
    return began is not None and began >= started


def _await_end(pid: int, limit_s: float = 5.0) -> None:
    deadline = time.monotonic() + limit_s
    while start_time(pid) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
