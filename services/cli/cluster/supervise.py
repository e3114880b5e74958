"""Starts the processes of a local cluster, restarts those that die, stops all in order. No threads, no event loop."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from services.cli.cluster.process import BLOCKED, signal_group, start_time

FIRST_BACKOFF_S = 0.2
LAST_BACKOFF_S = 5.0
STEADY_S = 30.0
"""A process that lived so long starts over at the first backoff."""
RESTART_LIMIT = 8
"""Deaths in a row, each before STEADY_S, after which the cluster is given up."""
SETTINGS_EXIT = 2


class GivenUp(Exception):
    """A process cannot be kept alive; the text holds the end of its log."""


@dataclass(slots=True)
class Child:
    """One supervised process. `stage`: children of a lower stage start earlier and stop later."""

    name: str
    stage: int
    start: Callable[[], int]
    log: Path
    pid: int | None = None
    started_ticks: int = 0
    born_at: float = 0.0
    deaths: int = 0
    restart_at: float | None = None
    exits: list[int] = field(default_factory=list)

    def launch(self) -> None:
        self.pid = self.start()
        self.started_ticks = start_time(self.pid) or 0
        self.born_at = time.monotonic()
        self.restart_at = None

    def died(self, code: int, now: float) -> None:
        """Reaped: schedule the restart, or raise GivenUp."""
        self.pid = None
        self.exits.append(code)
        self.deaths = 1 if now - self.born_at >= STEADY_S else self.deaths + 1
        if code == SETTINGS_EXIT or self.deaths > RESTART_LIMIT:
            raise GivenUp(f"{self.name} ended with code {code} ({self.deaths} times in a row)\n{self.log_end()}")
        self.restart_at = now + min(LAST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (self.deaths - 1))

    def log_end(self, lines: int = 12) -> str:
        text = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(f"  | {line[:400]}" for line in text[-lines:])


class Supervisor:
    """`signals` must be blocked (`block_signals`) before the first child starts."""

    def __init__(self, say: Callable[[str], None], changed: Callable[[], None]) -> None:
        self.children: list[Child] = []
        self._say = say
        self._changed = changed

    def add(self, child: Child) -> None:
        """Start `child` and look after it from now on."""
        child.launch()
        self.children.append(child)

    def wait(self, timeout_s: float) -> bool:
        """Look after the children for `timeout_s`; True when a signal asks to stop."""
        deadline = time.monotonic() + timeout_s
        while True:
            now = time.monotonic()
            self._restart_due(now)
            until = min([deadline, *(c.restart_at for c in self.children if c.restart_at is not None)])
            info = signal.sigtimedwait(BLOCKED, max(0.0, until - now))
            if info is not None and info.si_signo != signal.SIGCHLD:
                return True
            self._reap()
            if time.monotonic() >= deadline:
                return False

    def _restart_due(self, now: float) -> None:
        for child in self.children:
            if child.restart_at is not None and child.restart_at <= now:
                self._say(f"{child.name} ended with code {child.exits[-1]}; started again")
                child.launch()
                self._changed()

    def _reap(self) -> None:
        while (found := _next_dead()) is not None:
            pid, code = found
            child = next((child for child in self.children if child.pid == pid), None)
            if child is not None:
                signal_group(pid, signal.SIGKILL)
                child.died(code, time.monotonic())
                self._changed()

    def stop(self, grace_s: float) -> list[str]:
        """Stop all, highest stage first, each stage within `grace_s`; returns the names of those that were killed.

        Another signal cuts the grace: what runs gets a second SIGTERM, and a second to end.
        """
        killed: list[str] = []
        hurried = False
        for stage in sorted({child.stage for child in self.children}, reverse=True):
            running = [child for child in self.children if child.stage == stage and child.pid is not None]
            for child in running:
                os.kill(_pid(child), signal.SIGTERM)
            hurried = self._await(running, 1.0 if hurried else grace_s) or hurried
            for child in running:
                if child.pid is None:
                    continue
                if hurried:
                    os.kill(child.pid, signal.SIGTERM)
                    self._await([child], 1.0)
                if child.pid is not None:
                    killed.append(child.name)
                    signal_group(child.pid, signal.SIGKILL)
                    self._await([child], 5.0)
        return killed

    def _await(self, children: list[Child], limit_s: float) -> bool:
        """Until these have ended; True if a signal came first."""
        deadline = time.monotonic() + limit_s
        while any(child.pid is not None for child in children) and time.monotonic() < deadline:
            info = signal.sigtimedwait(BLOCKED, max(0.0, min(0.5, deadline - time.monotonic())))
            while (found := _next_dead()) is not None:
                for child in self.children:
                    if child.pid == found[0]:
                        child.pid = None
                        child.exits.append(found[1])
                        signal_group(found[0], signal.SIGKILL)
            if info is not None and info.si_signo != signal.SIGCHLD:
                return True
        return False


def _pid(child: Child) -> int:
    assert child.pid is not None
    return child.pid


def _next_dead() -> tuple[int, int] | None:
    """Pid and exit code (negative: the signal) of a child that has ended."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, os.waitstatus_to_exitcode(status)) if pid else None


def block_signals() -> None:
    """From now on signals wait for `Supervisor.wait`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
