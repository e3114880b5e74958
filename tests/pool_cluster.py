"""Pools of several nodes in one process, each with a client."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from services.bus import MemoryBus, MemoryHub
from tests.pool_node import Node, PoolClient, connect, running, settings


class World:
    """Pools a, b, c in this process with a client each."""

    def __init__(self, hub: MemoryHub) -> None:
        self.hub = hub
        self.nodes: dict[str, Node] = {}
        self.clients: dict[str, PoolClient] = {}

    def __getitem__(self, name: str) -> PoolClient:
        return self.clients[name]


@contextlib.asynccontextmanager
async def world(folder: Path, names: str, **fields: Any) -> AsyncIterator[World]:
    found = World(MemoryHub())
    async with contextlib.AsyncExitStack() as stack:
        for name in names:
            of = settings(folder, name, **fields)
            found.nodes[name] = await stack.enter_async_context(running(of, MemoryBus(found.hub)))
            found.clients[name] = await connect(of)
            stack.push_async_callback(found.clients[name].close)
        yield found


async def settled(client: PoolClient, *, held: int, used: int) -> None:
    """Wait until so many blocks are held and used: releases to peers are not waited for."""
    async with asyncio.timeout(20):
        while ((status := await client.status()).pinned_blocks, status.used_blocks) != (held, used):
            await asyncio.sleep(0.01)
