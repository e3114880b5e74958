"""Settings of a node's pool."""

import os
import tempfile
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from schemas.block_key import PAIRS, PLAIN
from schemas.subjects import NAME
from services.arena import ArenaIdentity
from services.settings import ServiceSettings

SHM = Path("/dev/shm")
SOCKET_PATH_BYTES = 107
"""The longest path the kernel takes for a Unix socket."""
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]


class KvPoolSettings(ServiceSettings, kw_only=True):
    """One pool per node. `model`, `block_size` (tokens), `block_bytes` and `key_version` say what a block is.

    The capacity is `capacity_blocks`, or as many blocks as fit into `capacity_bytes`. `arena` and `socket` are paths,
    by default named after cluster and node. `reset` abandons an arena of another model, layout or size instead of
    refusing to start. `keep_arena` False removes the arena at the end, else the next pool adopts it.
    `transport`: auto maps arenas of this host and uses Mooncake for others; shm and mooncake force one.
    """

    service: ClassVar[str] = "kvpool"

    node: str = "node-0"
    cluster: str = "local"
    model: str = ""
    block_size: Positive = 64
    block_bytes: Positive = 1 << 20
    key_version: str = PLAIN
    capacity_blocks: Annotated[int, Meta(ge=0)] = 0
    capacity_bytes: Annotated[int, Meta(ge=0)] = 0
    arena: str = ""
    socket: str = ""
    reset: bool = False
    keep_arena: bool = True
    transport: Literal["auto", "shm", "mooncake"] = "auto"
    transfer_host: str = "127.0.0.1"
    transfer_protocol: Literal["tcp", "rdma"] = "tcp"
    transfer_devices: str = ""
    transfer_ports: tuple[int, int] = (0, 0)
    pin_ttl_s: Seconds = 3600.0
    aside_s: Seconds = 30.0

    def __post_init__(self) -> None:
        if not NAME.match(self.node):
            raise ValueError(f"`node` {self.node!r} does not match [a-z0-9-]{{1,63}}")
        if not self.name:
            self.name = f"kvpool-{self.node}"[:63]
        super().__post_init__()
        if not self.model:
            raise ValueError("`model` is empty: name the model whose KV this pool holds")
        if self.key_version not in (PLAIN, PAIRS):
            raise ValueError(f"`key_version` {self.key_version!r} is neither {PLAIN!r} nor {PAIRS!r}")
        if bool(self.capacity_blocks) == bool(self.capacity_bytes):
            raise ValueError("give `capacity_blocks` or `capacity_bytes`, one of them")
        if not self.slots:
            raise ValueError(f"`capacity_bytes` {self.capacity_bytes} is less than one block of {self.block_bytes}")
        length = len(os.fsencode(self.socket_path))
        if length > SOCKET_PATH_BYTES:
            raise ValueError(f"`socket` {str(self.socket_path)!r} has {length} bytes, at most {SOCKET_PATH_BYTES} fit")

    @property
    def identity(self) -> ArenaIdentity:
        return ArenaIdentity(
            model=self.model,
            block_size=self.block_size,
            block_bytes=self.block_bytes,
            key_version=self.key_version,
        )

    @property
    def slots(self) -> int:
        """How many blocks the pool holds."""
        return self.capacity_blocks or self.capacity_bytes // self.block_bytes

    @property
    def arena_path(self) -> Path:
        return Path(self.arena) if self.arena else SHM / f"ei-{self.cluster}-{self.node}.arena"

    @property
    def socket_path(self) -> Path:
        return Path(self.socket) if self.socket else Path(tempfile.gettempdir()) / f"ei-{self.cluster}-{self.node}.sock"
