"""Child processes that die with their parent: forked services and the broker."""

import ctypes
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
BLOCKED = frozenset({signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals that the supervisor waits for; children take them unblocked."""
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with(parent: int) -> None:
    """Let the kernel kill this process when `parent`, which forked it, ends; exits at once if it has ended already."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _become_child(parent: int) -> None:
    """A process group of its own: signals of the terminal go to the supervisor alone."""
    os.setpgid(0, 0)
    die_with(parent)
    for number in BLOCKED:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)


def _redirect(log: Path) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.close(nothing)


def fork_call(call: Callable[[], int], log: Path, close: Sequence[int] = ()) -> int:
    """Run `call` in a fork of this process and return its pid; its result is the exit code.

    Must be called from a process without threads and event loops. `close`: file descriptors the child must not keep.
    """
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _become_child(parent)
        for descriptor in close:
            os.close(descriptor)
        _redirect(log)
        code = call()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    finally:
        if (error := sys.exception()) is not None:
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def spawn(command: Sequence[str], log: Path, environ: dict[str, str] | None = None) -> "subprocess.Popen[bytes]":
    """Run another program as a child that dies with us; its output is appended to `log`.

    Must be called from a process without threads, since it acts between fork and exec.
    """
    parent = os.getpid()
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environ,
            preexec_fn=lambda: _become_child(parent),
        )


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot, which tells it from a later one of its pid; None: gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] == "Z" else int(fields[19])


def own_age_s() -> float:
    """How long ago this process was started."""
    ticks = start_time(os.getpid())
    return time.clock_gettime(time.CLOCK_BOOTTIME) - (ticks or 0) / os.sysconf("SC_CLK_TCK")


def signal_group(pid: int, number: signal.Signals) -> bool:
    """Signal a child's whole process group; False when nothing of it is left."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
