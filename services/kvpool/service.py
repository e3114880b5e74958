"""The pool of one node as a process: arena, socket, NATS, and the loops that keep them going."""

import asyncio

from starlette.routing import BaseRoute

from schemas.subjects import Subjects
from services.app import App
from services.clock import incarnation_above
from services.kvpool.arena import Arena
from services.kvpool.core.pool import PoolCore
from services.kvpool.fetch import Fetcher
from services.kvpool.follow import References
from services.kvpool.local_server import LocalServer
from services.kvpool.metrics import PoolCollector, PoolMetrics
from services.kvpool.peers import PeerServer
from services.kvpool.publish import Publisher
from services.kvpool.pull import Puller
from services.kvpool.settings import KvPoolSettings
from services.kvpool.store import Store
from services.kvpool.transfer import Transport
from services.kvpool.transfer.mooncake import MooncakeOptions, MooncakeTransport
from services.kvpool.transfer.shm import ShmTransport, host_id
from services.observe import RateLimitedLog

TICK_S = 0.1
SWEEP_S = 5.0


class KvPool:
    """The service. Ready once the arena is mapped, the socket listens and peers are answered."""

    store: Store
    """Set by `start`."""

    def __init__(self, app: App[KvPoolSettings]) -> None:
        self._app, self._settings = app, app.settings
        self._arena: Arena | None = None
        self._local: LocalServer | None = None
        self._publisher: Publisher | None = None
        self.transports: list[Transport] = []
        """The ways to peers, best first."""

    async def start(self) -> None:
        """Map the arena, adopt what it holds, then let engine and peers in. ArenaError if it is not ours to use."""
        app, settings = self._app, self._settings
        store = self.store = await self._open()
        metrics, log = PoolMetrics(app.metrics), RateLimitedLog(app.log, app.clock)
        app.registry.register(PoolCollector(store))
        subjects, host = Subjects(settings.partition), host_id()
        network = self._make_transports(store, host)
        puller = Puller(store, app.bus, subjects, self.transports, app.clock, metrics, host=host)
        fetcher = Fetcher(store, puller, app.clock, app.tasks, metrics, node=settings.node)
        if network is not None and settings.transport == "mooncake":
            await network.session()
        self._publisher = Publisher(app.bus, subjects, settings.node, store, app.clock, metrics, log)
        self._local = LocalServer(settings.socket_path, store, fetcher, app.tasks, metrics, log)
        peers = PeerServer(
            app.bus,
            subjects,
            settings.node,
            store,
            fetcher,
            metrics,
            log,
            host=host,
            network=network,
            always=settings.transport == "mooncake",
        )
        await self._publisher.start(app.tasks)
        await peers.start()
        await References(app.bus, subjects, settings.node, store, metrics, log).start(app.tasks)
        await self._local.start()
        app.tasks.create_task(self._tick(store), name="expiry")
        app.tasks.create_task(self._sweep(), name="dead arenas")

    async def _open(self) -> Store:
        settings, clock = self._settings, self._app.clock
        began_s = clock.now()
        arena, found = await asyncio.to_thread(
            Arena.open,
            settings.arena_path,
            settings.identity,
            settings.slots,
            incarnation_above(),
            reset=settings.reset,
        )
        self._arena, incarnation = arena, arena.layout.incarnation
        core = PoolCore(
            settings.node, incarnation, settings.slots, pin_ttl_s=settings.pin_ttl_s, aside_s=settings.aside_s
        )
        store = await asyncio.to_thread(Store.adopt, core, arena, found, clock, debug_checks=settings.debug_checks)
        self._app.log.info(
            "arena_open",
            path=str(settings.arena_path),
            identity=str(settings.identity),
            slots=settings.slots,
            bytes=arena.layout.total_bytes,
            adopted_blocks=len(found.blocks),
            torn_slots=len(found.torn),
            incarnation=incarnation,
            took_s=round(clock.now() - began_s, 3),
        )
        return store

    def _make_transports(self, store: Store, host: str) -> MooncakeTransport | None:
        """The ways to peers, best first; returns the one over the network, None where only shm is allowed."""
        settings = self._settings
        if settings.transport != "mooncake":
            self.transports.append(ShmTransport(store.arena, host))
        if settings.transport == "shm":
            return None
        options = MooncakeOptions(
            host=settings.transfer_host,
            protocol=settings.transfer_protocol,
            devices=settings.transfer_devices,
            ports=settings.transfer_ports,
        )
        network = MooncakeTransport(store.arena, options, self._app.log)
        self.transports.append(network)
        return network

    async def _tick(self, store: Store) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            store.tick()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            for transport in self.transports:
                if isinstance(transport, ShmTransport):
                    transport.forget_dead()

    def not_ready(self) -> list[str]:
        return [] if self._local is not None else ["the arena is not mapped yet"]

    def routes(self) -> list[BaseRoute]:
        return []

    async def drain(self) -> None:
        """Say what has changed; fetches under way end with their connections."""
        if self._publisher is not None:
            await self._publisher.flush()

    async def stop(self) -> None:
        """Leave socket and arena; another pool may adopt it."""
        if self._local is not None:
            await self._local.stop()
        for transport in self.transports:
            await transport.close()
        if self._arena is not None:
            if self._settings.keep_arena:
                self._arena.leave()
            else:
                self._arena.remove()
