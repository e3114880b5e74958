"""Processes of a local cluster: they restart, stop in order, die with their parent, and leave nothing."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.cli.cluster.process import start_time
from services.cli.cluster.rundir import (
    SHM,
    ClusterState,
    InUse,
    ProcessRecord,
    RunDirectory,
    read_state,
    run_path,
    shm_prefix,
)

PORT = 65_000 + os.getpid() % 500
"""Names a run directory; nothing listens on it."""
WAIT_S = 20.0


@pytest.fixture
def directory() -> Iterator[RunDirectory]:
    taken = RunDirectory(PORT)
    yield taken
    taken.give_back()


@contextmanager
def script(text: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a supervisor in a process of its own: pytest itself has threads."""
    command = [sys.executable, "-c", textwrap.dedent(text), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def lines(process: subprocess.Popen[bytes]) -> Iterator[str]:
    assert process.stdout is not None
    for line in process.stdout:
        yield line.decode().strip()


def gone(pid: int) -> bool:
    deadline = time.monotonic() + WAIT_S
    while start_time(pid) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    return start_time(pid) is None


SUPERVISOR = """
    import os, signal, sys, time
    from pathlib import Path
    from services.cli.cluster.process import fork_call
    from services.cli.cluster.supervise import Child, Supervisor, GivenUp, block_signals

    folder = Path(sys.argv[1])

    def say(text):
        print(text, flush=True)

    def service(name, code):
        def run():
            stopped = []
            signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
            while not stopped:
                time.sleep(0.01)
                if code is not None:
                    return code
            with (folder / "stopped").open("a") as file:
                file.write(name + "\\n")
            return 0
        return run

    def child(name, stage, code=None):
        log = folder / f"{name}.log"
        return Child(name, stage, lambda: fork_call(service(name, code), log), log)

    block_signals()
    supervisor = Supervisor(say, lambda: say("pids " + " ".join(f"{c.name}={c.pid}" for c in supervisor.children)))
"""


def test_a_killed_child_is_started_again_and_all_stop_from_the_top(tmp_path: Path) -> None:
    text = (
        SUPERVISOR
        + """
    for name, stage in (("pool", 1), ("engine", 2), ("router", 3)):
        supervisor.add(child(name, stage))
    supervisor._changed()
    while not supervisor.wait(60): pass
    say("killed " + repr(supervisor.stop(10)))
    """
    )
    with script(text, str(tmp_path)) as process:
        output = lines(process)
        pids = dict(pair.split("=") for pair in next(output).split()[1:])
        os.kill(int(pids["engine"]), signal.SIGKILL)
        while not (line := next(output)).startswith("pids") or "engine=None" in line:
            pass
        again = dict(pair.split("=") for pair in line.split()[1:])
        assert again["engine"] != pids["engine"]
        process.send_signal(signal.SIGINT)
        assert list(output)[-1] == "killed []"
        assert (tmp_path / "stopped").read_text().split() == ["router", "engine", "pool"]
        assert process.wait() == 0


@pytest.mark.parametrize(("code", "deaths"), [(2, 1), (7, 9)])
def test_a_child_that_never_lives_is_given_up(tmp_path: Path, code: int, deaths: int) -> None:
    text = (
        SUPERVISOR
        + f"""
    from services.cli.cluster import supervise
    supervise.FIRST_BACKOFF_S = supervise.LAST_BACKOFF_S = 0.01
    try:
        supervisor.add(child("bad", 1, {code}))
        while not supervisor.wait(60): pass
    except GivenUp as error:
        say("given up: " + str(error).splitlines()[0])
    """
    )
    with script(text, str(tmp_path)) as process:
        assert list(lines(process))[-1] == f"given up: bad ended with code {code} ({deaths} times in a row)"


def test_children_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    text = (
        SUPERVISOR
        + """
    supervisor.add(child("one", 1))
    supervisor._changed()
    while not supervisor.wait(60): pass
    """
    )
    with script(text, str(tmp_path)) as process:
        pid = int(next(lines(process)).split("=")[1])
        process.kill()
        assert gone(pid)
        assert process.wait() == -signal.SIGKILL


def arena_of(directory: RunDirectory) -> Path:
    return directory.arenas(1) / f"{directory.shm_prefix}node-0.arena"


def test_the_directory_is_held_by_one_cluster_and_left_empty(directory: RunDirectory) -> None:
    assert directory.take() == []
    directory.write(state_of({}))
    arena_of(directory).write_bytes(b"x")
    with pytest.raises(InUse, match=f"process {os.getpid()} runs a cluster"):
        RunDirectory(PORT).take()
    directory.give_back()
    assert not run_path(PORT).exists()
    assert list(SHM.glob(f"{shm_prefix(PORT)}*")) == []


def test_what_a_killed_run_left_is_swept(directory: RunDirectory) -> None:
    orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
    started = start_time(orphan.pid)
    assert started is not None
    run_path(PORT).mkdir()
    directory.write(
        state_of(
            {
                "engine-node-0": ProcessRecord(orphan.pid, started),
                "reused-pid": ProcessRecord(bystander.pid, started + 10**9),
            }
        )
    )
    arena = arena_of(directory)
    arena.write_bytes(b"x")
    swept = directory.take()
    assert orphan.wait(WAIT_S) == -signal.SIGKILL
    assert bystander.poll() is None, "a process that merely has the pid is left alone"
    bystander.kill()
    bystander.wait()
    assert f"process group {orphan.pid} (engine-node-0)" in swept
    assert str(arena) in swept
    assert read_state(run_path(PORT)) is None


def state_of(processes: dict[str, ProcessRecord]) -> ClusterState:
    return ClusterState(
        pid=os.getpid(),
        started=0,
        url="http://127.0.0.1:1",
        nats_url="nats://127.0.0.1:1",
        nkey="",
        partition="p0",
        engine="timed",
        nodes=[],
        processes=processes,
    )
