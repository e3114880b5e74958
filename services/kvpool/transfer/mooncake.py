"""Peers on other hosts: Mooncake's transfer engine, RDMA where there is a card, TCP elsewhere.

What it does that shapes this code (0.3.13, measured): synchronous calls burn a core, so everything is asynchronous and
polled; a status call looks at the first entry of a batch only, so a batch has one entry; more than 2,048 queued
entries jam a peer, so few are in flight; a timed-out transfer may still write its buffer, so its slots stay unused.
Its two ports listen on every interface without any check of who asks: they belong on a private network.
"""

import asyncio
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from structlog.typing import FilteringBoundLogger

from schemas.pool import LeaseReply
from services.kvpool.arena import Arena
from services.kvpool.transfer.polling import Poller
from services.kvpool.transfer.types import BlockCopy, CopyJob, TransportError


@dataclass(frozen=True, kw_only=True)
class MooncakeOptions:
    """`host`: the name or address under which peers reach this node. `protocol`: tcp or rdma; `devices`: RDMA cards,
    comma-separated, "" for all. `ports`: first and last port it may take (it takes two), (0, 0) for its default."""

    host: str = "127.0.0.1"
    protocol: str = "tcp"
    devices: str = ""
    ports: tuple[int, int] = (0, 0)


class MooncakeTransport:
    """Reads peers' arenas, and opens the own one to them, by one transfer engine that starts when first needed."""

    name = "mooncake"

    def __init__(self, arena: Arena, options: MooncakeOptions, log: FilteringBoundLogger) -> None:
        self._arena, self._options, self._log = arena, options, log
        self._starting = asyncio.Lock()
        self._engine: Any = None
        self._session = ""
        self._poller: Poller | None = None

    async def session(self) -> tuple[str, int]:
        """Where peers reach our arena: Mooncake's session, and the address of slot 0. TransportError if nowhere."""
        async with self._starting:
            if self._engine is None:
                await asyncio.to_thread(self._start)
        return self._session, self._arena.data_address

    def _start(self) -> None:
        options = self._options
        if options.protocol == "tcp":
            os.environ.setdefault("MC_FORCE_TCP", "1")
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        if options.ports != (0, 0):
            os.environ["MC_MIN_PRC_PORT"], os.environ["MC_MAX_PRC_PORT"] = map(str, options.ports)
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise TransportError(f"Mooncake cannot be imported: {error}") from error
        engine = TransferEngine()
        if engine.initialize(options.host, "P2PHANDSHAKE", options.protocol, options.devices):
            raise TransportError(f"Mooncake does not start on {options.host} with {options.protocol}")
        registered = engine.register_memory(self._arena.data_address, self._arena.data_bytes)
        if registered:
            raise TransportError(f"Mooncake does not take the arena of {self._arena.data_bytes} bytes: {registered}")
        self._session = f"{options.host}:{engine.get_rpc_port()}"
        self._poller = Poller(engine, self._arena)
        self._engine = engine
        self._log.info(
            "mooncake_started",
            session=self._session,
            protocol=options.protocol,
            forced_tcp=os.environ.get("MC_FORCE_TCP") == "1",
            topology=engine.get_local_topology(),
            threads=threading.active_count(),
        )

    def reaches(self, lease: LeaseReply) -> bool:
        return bool(lease.session and lease.base_address)

    async def begin(self, lease: LeaseReply, blocks: Sequence[BlockCopy]) -> CopyJob:
        if lease.slot_bytes != self._arena.layout.slot_bytes:
            raise TransportError(f"slots of {lease.slot_bytes} bytes there, {self._arena.layout.slot_bytes} here")
        await self.session()
        assert self._poller is not None
        job = CopyJob(blocks, asyncio.get_running_loop())
        self._poller.submit(job, lease.session, lease.base_address)
        return job

    async def close(self) -> None:
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        """End poller and engine now: left to the garbage collector, the engine would stop the loop for long."""
        poller, engine = self._poller, self._engine
        self._poller = self._engine = None
        if poller is not None:
            poller.close()
        if engine is not None:
            engine.unregister_memory(self._arena.data_address)
