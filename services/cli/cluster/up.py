"""`ei up`: starts a local cluster from one process that has imported everything, and keeps it running."""

import gc
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from schemas.roles import Role, grant
from schemas.subjects import DEFAULT_PARTITION, Subjects
from services.broker import Broker, BrokerConfig, BrokerError, users, write_keys
from services.cli.cluster import ready, toml
from services.cli.cluster.catalogue import Kind, Places, ServiceSpec, services_of
from services.cli.cluster.overrides import OverrideError, apply_overrides
from services.cli.cluster.process import fork_call, own_age_s, start_time
from services.cli.cluster.rundir import ClusterState, InUse, ProcessRecord, RunDirectory
from services.cli.cluster.sizes import SizeError, plan_nodes
from services.cli.cluster.supervise import Child, GivenUp, Supervisor, block_signals
from services.cli.keys import OPERATOR, KeyPlan, key_path, members
from services.engine.sglang import leftovers

READY_S = {"timed": 60.0, "sglang": 900.0}
DRAIN_S = 30.0
MATCH_TIMEOUT_S = 0.5
"""Engines of a local cluster take the very cores that the directory answers with."""
_READY_POLL_S = 0.05


class UpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `ei up` was asked for; `settings` are `SERVICE.KEY=VALUE`."""

    nodes: int = 3
    engine: str = "sglang"
    model: Path | None = None
    script: Path | None = None
    nats: str | None = None
    port: int = 8000
    split: str | None = None
    settings: list[str] = []
    logs: Path | None = None


def say(text: str) -> None:
    """One line for whoever started us."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run_cluster(options: UpOptions) -> int:
    """Run a cluster until a signal or a failure; the exit code."""
    directory = RunDirectory(options.port)
    block_signals()
    try:
        for what in directory.take():
            say(f"swept {what} of a run that was killed")
        return LocalRun(options, directory).run()
    except (InUse, BrokerError, OverrideError, SizeError, GivenUp, ValueError) as error:
        say(f"ei up: {error}")
        return 1
    finally:
        directory.give_back()
        if options.engine == "sglang":
            leftovers.sweep(Path(tempfile.gettempdir()))


class LocalRun:
    """One run in a taken directory."""

    def __init__(self, options: UpOptions, directory: RunDirectory) -> None:
        self._options, self._directory = options, directory
        self._begun = time.monotonic() - own_age_s()
        self._plan = plan_nodes(options.nodes, options.engine, options.model, options.split, options.script)
        self._logs = options.logs or directory.place("logs")
        self._logs.mkdir(parents=True, exist_ok=True)
        self._supervisor = Supervisor(say, self._publish)
        self._state: ClusterState | None = None

    def run(self) -> int:
        """Start everything, serve, stop everything."""
        try:
            self._start()
            stopped = self._await_ready()
            while not stopped:
                stopped = self._supervisor.wait(3600.0)
            say("stopping")
            return 0
        finally:
            killed = self._supervisor.stop(DRAIN_S + 5)
            if killed:
                say(f"killed, since they did not stop by themselves: {', '.join(killed)}")

    def _start(self) -> None:
        """Fork every service as soon as its module is imported: what starts first uses one core while the next import
        uses another. No thread and no event loop exists here, ever.
        """
        broker, keys = self._broker()
        places = self._places(broker.url if broker is not None else str(self._options.nats), keys)
        self._state = self._first_state(places)
        for spec in apply_overrides(services_of(places, self._plan), self._options.settings):
            call = self._call(spec)
            gc.freeze()
            self._supervisor.add(self._child(spec, call))
        self._publish()

    def _broker(self) -> tuple[Broker | None, Path | None]:
        """A broker of our own with a key per service, unless one was named."""
        if self._options.nats is not None:
            return None, None
        keys = self._directory.place("keys")
        subjects = Subjects(DEFAULT_PARTITION)
        paths = write_keys(keys, members(KeyPlan(nodes=tuple(self._plan.names))))
        config = BrokerConfig(users=users(paths, subjects), anonymous=grant(Role.ANONYMOUS, subjects))
        broker = Broker(self._directory.place("broker"), config)

        def start() -> int:
            broker.start()
            return broker.pid

        log = self._directory.place("broker") / "nats.log"
        self._supervisor.add(Child("broker", 0, start, log))
        return broker, keys

    def _places(self, nats_url: str, keys: Path | None) -> Places:
        return Places(
            nats_url=nats_url,
            keys=keys,
            sockets=self._directory.place("sockets"),
            arenas=self._directory.arenas(self._plan.arena_bytes * self._options.nodes),
            prefix=self._directory.shm_prefix,
            state=self._directory.place("state"),
            ports={Kind.ROUTER: self._options.port},
            ports_dir=str(self._directory.place("ports")),
            match_timeout_s=MATCH_TIMEOUT_S,
        )

    def _call(self, spec: ServiceSpec) -> Callable[[], int]:
        """The service's command as a call in a fork of this process: same module, same arguments."""
        path = self._directory.place("config") / spec.file
        path.write_text(toml.dumps(spec.settings))
        module = importlib.import_module(spec.module)
        scratch = str(self._directory.place("tmp"))

        def call() -> int:
            os.environ["TMPDIR"] = tempfile.tempdir = scratch
            sys.argv = [spec.command, "--config", str(path)]
            return int(module.main())

        return call

    def _child(self, spec: ServiceSpec, call: Callable[[], int]) -> Child:
        log = self._logs / f"{spec.label}.log"
        return Child(spec.label, spec.stage, lambda: fork_call(call, log, [self._directory.lock_descriptor]), log)

    def _first_state(self, places: Places) -> ClusterState:
        return ClusterState(
            pid=os.getpid(),
            started=start_time(os.getpid()) or 0,
            url=f"http://127.0.0.1:{self._options.port}",
            nats_url=places.nats_url,
            nkey=str(key_path(places.keys, OPERATOR)) if places.keys is not None else "",
            partition=places.partition,
            engine=self._plan.engine,
            nodes=self._plan.names,
        )

    def _publish(self) -> None:
        """Processes changed: say so to other commands, and to the run that may have to sweep them."""
        if self._state is None:
            return
        running = {
            c.name: ProcessRecord(c.pid, c.started_ticks) for c in self._supervisor.children if c.pid is not None
        }
        self._state = msgspec.structs.replace(self._state, processes=running)
        self._directory.write(self._state)

    def _await_ready(self) -> bool:
        """Until every node serves; True when a signal came first. GivenUp names what is missing at the end."""
        limit_s = READY_S[self._plan.engine]
        say(f"starting {self._options.nodes} nodes ({self._plan.engine}, {self._plan.model_name}), {self._plan.split}")
        waiting: list[str] = []
        while True:
            if self._supervisor.wait(_READY_POLL_S):
                return True
            waiting = ready.missing(self._options.port, self._plan.names)
            if not waiting:
                break
            if time.monotonic() - self._begun > limit_s:
                raise GivenUp(f"not ready after {limit_s:g} s: {'; '.join(waiting)}")
        took_s = time.monotonic() - self._begun
        assert self._state is not None
        self._state = msgspec.structs.replace(self._state, ready=True, ready_after_s=took_s)
        self._publish()
        say(f"ready after {took_s:.1f} s: {self._state.url} (Ctrl-C ends)")
        say(f"broker for harnesses and ei-hook: EI_NATS_URL={self._state.nats_url}")
        return False
