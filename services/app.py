"""The life of a service process: bus, HTTP, tasks, signals, drain, exit code."""

import asyncio
import logging
import os
import signal
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import uvloop
from prometheus_client import CollectorRegistry, ProcessCollector
from starlette.routing import BaseRoute
from structlog.typing import FilteringBoundLogger

from services.bounded import CutShort, bounded
from services.bus import Bus
from services.bus.metrics import BusCollector
from services.clock import Clock, SystemClock
from services.connecting import connect
from services.discovery import Announcer, Identity
from services.http_server import HttpServer
from services.observe import LibraryLogs, Metrics, logger
from services.settings import ServiceSettings, SettingsError, load
from services.supervisor import notify, watchdog

SettingsOf = TypeVar("SettingsOf", bound=ServiceSettings)
EXIT_OK, EXIT_CRASH, EXIT_SETTINGS = 0, 1, 2
_HTTP_GRACE_S = 5.0


@dataclass
class App(Generic[SettingsOf]):
    """What a service is given. `stopping` is set when the drain begins; `http_port` is the bound one."""

    settings: SettingsOf
    bus: Bus
    clock: Clock
    log: FilteringBoundLogger
    registry: CollectorRegistry
    metrics: Metrics
    tasks: asyncio.TaskGroup
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    http_port: int = 0


class Service(Protocol):
    """One service. Any exception out of it, or out of a task it started, ends the process with exit code 1."""

    async def start(self) -> None:
        """Subscribe, start loops on `app.tasks`."""
        ...

    def not_ready(self) -> list[str]:
        """Why no work can be taken now, in words for an operator; [] when ready."""
        ...

    def routes(self) -> list[BaseRoute]:
        """HTTP routes besides /health, /ready and /metrics."""
        ...

    async def drain(self) -> None:
        """Stop taking work and finish what runs; cancelled after `settings.drain_s` or by a second signal."""
        ...

    async def stop(self) -> None:
        """Give back what is held, also after a start that was cut short; cancelled after `settings.stop_s`."""
        ...


Build = Callable[[App[SettingsOf]], Service]


class _Stopped(Exception):
    """Raised inside the task group to end its tasks."""


async def serve(
    build: Build[SettingsOf],
    settings: SettingsOf,
    *,
    stop: asyncio.Event,
    hurry: asyncio.Event | None = None,
    bus: Bus | None = None,
    clock: Clock | None = None,
    log: FilteringBoundLogger | None = None,
    started: Callable[[App[SettingsOf]], None] | None = None,
) -> None:
    """Run one service until `stop` is set, then drain it; raises what the service raised.

    Touches neither signals nor anything global, so several may run in one loop. A `bus` that is passed in stays open.
    `hurry` cuts the drain short. `started` is called once the service has started.
    """
    log = log or logger(settings.service, level=settings.log_level, name=settings.name)
    hurry = hurry or asyncio.Event()
    http = HttpServer(settings, log)
    await http.start()
    try:
        http.not_ready = lambda: [f"no broker at {settings.nats_url}"]
        connected: Bus = bus if bus is not None else await bounded(connect(settings, log), stop)
        try:
            await _Life(build, settings, connected, clock or SystemClock(), log, http).run(stop, hurry, started)
            if bus is None:
                await connected.drain()
        finally:
            if bus is None:
                await connected.close()
    except CutShort:
        log.info("stopped_before_start")
    finally:
        await http.stop(0 if hurry.is_set() else _HTTP_GRACE_S)


class _Life(Generic[SettingsOf]):
    """One service from build to stop."""

    def __init__(
        self,
        build: Build[SettingsOf],
        settings: SettingsOf,
        bus: Bus,
        clock: Clock,
        log: FilteringBoundLogger,
        http: HttpServer,
    ) -> None:
        self._build, self._settings, self._bus, self._clock, self._log = build, settings, bus, clock, log
        self._http = http
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(
        self, stop: asyncio.Event, hurry: asyncio.Event, started: Callable[[App[SettingsOf]], None] | None
    ) -> None:
        self._bus.on_failure(self._failed)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch_bus(), name="bus failure")
                app = self._app(tasks)
                service = self._build(app)
                try:
                    await bounded(self._start(app, service), stop)
                    if started is not None:
                        started(app)
                    await stop.wait()
                    await self._drain(app, service, hurry)
                except CutShort:
                    self._log.warning("start_cut_short")
                await self._stop(service)
                raise _Stopped
        except* _Stopped:
            self._log.info("stopped")

    def _app(self, tasks: asyncio.TaskGroup) -> App[SettingsOf]:
        settings, registry = self._settings, self._http.registry
        return App(
            settings=settings,
            bus=self._bus,
            clock=self._clock,
            log=self._log,
            registry=registry,
            metrics=Metrics(settings.service, registry),
            tasks=tasks,
            http_port=self._http.port,
        )

    async def _start(self, app: App[SettingsOf], service: Service) -> None:
        registry = self._http.registry
        ProcessCollector(registry=registry)
        registry.register(BusCollector(self._bus))
        await service.start()
        metadata = {"name": self._settings.name, "http": f"{self._settings.http_host}:{self._http.port}"}
        await Announcer(self._bus, Identity(f"ei-{self._settings.service}", metadata=metadata)).start()
        self._http.add(service.routes())
        self._http.not_ready = lambda: self._not_ready(app, service)
        app.tasks.create_task(watchdog(), name="watchdog")
        self._log.info("started", http_port=self._http.port, pid=os.getpid())

    def _not_ready(self, app: App[SettingsOf], service: Service) -> list[str]:
        bus = self._bus
        reasons = [] if bus.connected else [f"no broker at {self._settings.nats_url}"]
        stopping = ["stopping"] if app.stopping.is_set() else []
        return stopping + reasons + bus.refusals() + service.not_ready()

    async def _drain(self, app: App[SettingsOf], service: Service, hurry: asyncio.Event) -> None:
        app.stopping.set()
        drain_s = self._settings.drain_s
        self._log.info("draining", drain_s=drain_s)
        try:
            await bounded(service.drain(), hurry, timeout_s=drain_s)
        except CutShort:
            self._log.warning("drain_cut_short", hurried=hurry.is_set(), drain_s=drain_s)

    async def _stop(self, service: Service) -> None:
        stop_s = self._settings.stop_s
        try:
            await bounded(service.stop(), timeout_s=stop_s)
        except CutShort:
            self._log.warning("stop_cut_short", stop_s=stop_s)

    def _failed(self, error: Exception) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    async def _watch_bus(self) -> None:
        await self._failure


def run(build: Build[SettingsOf], settings: SettingsOf) -> int:
    """Run one service as this process, until SIGTERM or SIGINT.

    The exit code: 0 ended well, 1 crashed, 2 a setting cannot be used.
    """
    log = logger(settings.service, level=settings.log_level, name=settings.name)
    handler = LibraryLogs(log)
    logging.getLogger().addHandler(handler)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_with_signals(build, settings, log))
    except SettingsError as error:
        log.error("bad_setting", error=str(error))
        return EXIT_SETTINGS
    except Exception as error:  # whatever ended the service is logged as JSON, and the exit code says so
        log.error("crashed", exc_info=error)
        return EXIT_CRASH
    finally:
        logging.getLogger().removeHandler(handler)
    return EXIT_OK


async def _with_signals(build: Build[SettingsOf], settings: SettingsOf, log: FilteringBoundLogger) -> None:
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            hurry.set()
        else:
            notify("STOPPING=1")
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    await serve(build, settings, stop=stop, hurry=hurry, log=log, started=lambda _: notify("READY=1"))


def command(kind: type[SettingsOf], build: Build[SettingsOf], argv: Sequence[str] | None = None) -> int:
    """The command of a service: `--config FILE`, `EI_*` over it; exit code 2 when a setting cannot be used."""
    parser = ArgumentParser(prog=f"ei-{kind.service}")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file; EI_<FIELD> variables go over it")
    arguments = parser.parse_args(argv)
    try:
        settings = load(kind, arguments.config, os.environ)
    except SettingsError as error:
        sys.stderr.write(f"ei-{kind.service}: {error}\n")
        return EXIT_SETTINGS
    return run(build, settings)
