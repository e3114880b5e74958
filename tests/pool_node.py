"""Pools as services: in the test's own process, or one of their own to kill and freeze."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from schemas.kv import BlockMedia
from schemas.pool import (
    AllocateRequest,
    AttachRequest,
    CommitRequest,
    Empty,
    FetchReply,
    FetchRequest,
    LocateRequest,
    PoolSource,
    PoolStatus,
    ReleaseRequest,
)
from services.app import App, serve
from services.arena import ArenaReader
from services.bus import Bus
from services.kvpool.service import KvPool
from services.kvpool.settings import KvPoolSettings
from services.local_call import ALLOCATE, COMMIT, FETCH, LOCATE, RELEASE, STATUS, LocalClient
from tests.pool_world import content

BLOCK_BYTES = 8192


def settings(folder: Path, node: str, **fields: Any) -> KvPoolSettings:
    """A small pool whose files lie in `folder`."""
    given: dict[str, Any] = {
        "node": node,
        "model": "tiny",
        "block_size": 16,
        "block_bytes": BLOCK_BYTES,
        "capacity_blocks": 64,
        "arena": str(folder / f"{node}.arena"),
        "socket": str(folder / f"{node}.sock"),
        "debug_checks": True,
        "log_level": "error",
    }
    return KvPoolSettings(**given | fields)


def attach(of: KvPoolSettings, role: str = "engine") -> AttachRequest:
    """What a client that fits this pool says first."""
    return AttachRequest(
        role=role,
        model=of.model,
        block_size=of.block_size,
        block_bytes=of.block_bytes,
        key_version=of.key_version,
    )


@dataclass
class PoolClient:
    """An engine's view of a pool: its connection and its mapping of the arena."""

    client: LocalClient
    settings: KvPoolSettings
    task: asyncio.Task[None]
    reader: ArenaReader | None = None

    @property
    def arena(self) -> ArenaReader:
        if self.reader is None or not self.reader.live:
            self.reader = ArenaReader(self.settings.arena_path, writable=True)
        return self.reader

    async def write(self, digests: Sequence[bytes], parent: bytes = b"") -> int:
        """Store blocks whose bytes follow from their digests; how many were committed."""
        request = AllocateRequest(digests=b"".join(digests), parent=parent)
        return await self.fill(digests, (await self.client.call(ALLOCATE, request)).slots)

    async def fill(self, digests: Sequence[bytes], slots: Sequence[tuple[int, int] | None]) -> int:
        """Write blocks into the slots given for them; how many were committed."""
        written = []
        for digest, slot in zip(digests, slots, strict=True):
            if slot is not None:
                fingerprint = self.arena.write(*slot, content(digest, self.settings.block_bytes))
                assert fingerprint is not None
                written.append((*slot, self.settings.block_bytes, fingerprint))
        return (await self.client.call(COMMIT, CommitRequest(slots=written))).committed

    async def fetch(
        self,
        id_: str,
        digests: Sequence[bytes],
        sources: Sequence[tuple[str, int, int]] = (),
        deadline_s: float = 10.0,
        device_blocks: int = 0,
        media: Sequence[BlockMedia] = (),
    ) -> FetchReply:
        """Fetch and pin a prefix."""
        request = FetchRequest(
            id=id_,
            digests=b"".join(digests),
            sources=[PoolSource(node=node, first=first, last=last) for node, first, last in sources],
            deadline_s=deadline_s,
            device_blocks=device_blocks,
            media=list(media),
        )
        return await self.client.call(FETCH, request, timeout_s=deadline_s + 5.0)

    async def release(self, id_: str) -> None:
        await self.client.call(RELEASE, ReleaseRequest(id=id_))

    async def locate(self, digests: Sequence[bytes]) -> int:
        return (await self.client.call(LOCATE, LocateRequest(digests=b"".join(digests)))).blocks

    async def status(self) -> PoolStatus:
        return await self.client.call(STATUS, Empty())

    def holds_right_bytes(self, digests: Sequence[bytes]) -> bool:
        """Whether each block can be read here and has the bytes of its digest."""
        buffer = bytearray(self.settings.block_bytes)
        found = self.arena.lookup(b"".join(digests))
        return len(found) == len(digests) and all(
            self.arena.read_into(info.slot, info.generation, buffer)
            and buffer == content(digest, self.settings.block_bytes).tobytes()
            for info, digest in zip(found, digests, strict=True)
        )

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def connect(of: KvPoolSettings, role: str = "engine") -> PoolClient:
    """Attach to a running pool."""
    client = LocalClient(of.socket_path, attach(of, role))
    task = asyncio.create_task(client.run())
    await client.wait_attached(30.0)
    return PoolClient(client, of, task)


@dataclass
class Node:
    """A pool in this process."""

    settings: KvPoolSettings
    app: App[KvPoolSettings]
    pool: KvPool
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    def metric(self, name: str, **labels: str) -> float:
        """A sample of the pool's own registry; 0 where it was never counted."""
        return self.app.registry.get_sample_value(f"ei_kvpool_{name}", labels) or 0.0


@contextlib.asynccontextmanager
async def running(of: KvPoolSettings, bus: Bus) -> AsyncIterator[Node]:
    """A pool in this process, stopped after the block; what it raises is raised."""
    nodes: list[Node] = []
    stop, ready = asyncio.Event(), asyncio.Event()

    def build(app: App[KvPoolSettings]) -> KvPool:
        pool = KvPool(app)
        nodes.append(Node(of, app, pool, stop))
        return pool

    task = asyncio.create_task(serve(build, of, stop=stop, bus=bus, started=lambda _: ready.set()))
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if task.done():
        task.result()
    try:
        yield nodes[0]
    finally:
        stop.set()
        await task


@dataclass
class PoolProcess:
    """A pool in a process of its own."""

    settings: KvPoolSettings
    process: asyncio.subprocess.Process

    @classmethod
    async def start(cls, of: KvPoolSettings, nats_url: str) -> "PoolProcess":
        """Start it and wait until its socket answers."""
        environ = {key: value for key, value in os.environ.items() if not key.startswith("EI_")}
        given = msgspec.to_builtins(msgspec.structs.replace(of, nats_url=nats_url))
        for key, value in given.items():
            environ[f"EI_{key.upper()}"] = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-W", "error", "-m", "services.kvpool", env=environ
        )
        return cls(of, process)

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        """SIGKILL, and wait for the end; fine if it has ended."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
