"""A local cluster as a subprocess of another command: the demo and the benches start theirs with it."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from services.cli.cluster.process import spawn
from services.cli.cluster.rundir import ClusterState, read_state, run_path
from services.cli.connection import CommandError, Target

_POLL_S = 0.05
_STOP_S = 60.0


class LocalCluster:
    """`ei up` on `port` with these further arguments. Its output goes to `log`."""

    def __init__(self, port: int, arguments: Sequence[str], log: Path) -> None:
        self.port, self.log = port, log
        self._command = [sys.executable, "-m", "services.cli.main", "up", "--port", str(port), *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def target(self) -> Target:
        return Target.find(self.port, None, None, {})

    @property
    def state(self) -> ClusterState:
        """What the cluster published about itself; CommandError when it does not run."""
        state = read_state(run_path(self.port))
        if state is None:
            raise CommandError(f"no cluster runs on port {self.port}\n{self._log_end()}")
        return state

    async def start(self, ready_s: float) -> None:
        """Start it and wait until it serves; CommandError if it ends before."""
        self.log.write_bytes(b"")
        self._process = spawn(self._command, self.log)
        begun = time.monotonic()
        while True:
            elapsed_s = time.monotonic() - begun
            if self._process.poll() is not None:
                raise CommandError(f"the cluster ended with {self._process.returncode}\n{self._log_end()}")
            state = read_state(run_path(self.port))
            if state is not None and state.ready and state.pid == self._process.pid:
                return
            if elapsed_s > ready_s:
                raise CommandError(f"the cluster was not ready within {ready_s:g} s\n{self._log_end()}")
            await asyncio.sleep(_POLL_S)

    async def ended(self) -> None:
        """Returns never; CommandError when the cluster ends by itself."""
        if self._process is not None:
            ended, loop = asyncio.Event(), asyncio.get_running_loop()
            descriptor = os.pidfd_open(self._process.pid)
            loop.add_reader(descriptor, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)
        raise CommandError(f"the cluster ended by itself\n{self._log_end()}")

    async def stop(self) -> int:
        """Ctrl-C it and wait; returns its exit code."""
        if self._process is None:
            return 0
        process, self._process = self._process, None
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            return await asyncio.to_thread(process.wait, _STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return await asyncio.to_thread(process.wait)

    def _log_end(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(f"  | {line}" for line in lines[-20:])


@asynccontextmanager
async def local_cluster(port: int, arguments: Sequence[str], log: Path, ready_s: float) -> AsyncIterator[LocalCluster]:
    """A cluster that runs inside the `with`."""
    cluster = LocalCluster(port, arguments, log)
    try:
        await cluster.start(ready_s)
        yield cluster
    finally:
        await cluster.stop()
