"""How a connection is made and made again: nats-py has no jitter, so this is ours."""

import random
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from nats.aio.client import Client, Server

RECONNECT_FROM_S, RECONNECT_TO_S = 0.1, 2.0
"""Each try to reconnect waits a random time between these: a returning broker meets its clients one by one."""
PING_S = 5.0
PENDING_BYTES = 16 << 20
FLUSH_S = 2.0


Callback = Callable[..., Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Options:
    """How to connect; see `NatsBus.connect`."""

    url: str
    name: str
    nkey_seed: str | None
    inbox: str
    tls: ssl.SSLContext | None
    ping_s: float
    pending_bytes: int


def reconnect_delay(servers: list[Server], info: dict[str, Any]) -> tuple[Server | None, float]:
    """Which server to try next and when: any, after a random time."""
    return (random.choice(servers) if servers else None), random.uniform(RECONNECT_FROM_S, RECONNECT_TO_S)


async def dial(client: Client, options: Options, **callbacks: Callback) -> None:
    """Connect `client`, however long it takes, to reconnect by itself ever after."""
    await client.connect(
        options.url.split(","),
        name=options.name,
        nkeys_seed_str=options.nkey_seed,
        tls=options.tls,
        max_reconnect_attempts=-1,
        reconnect_time_wait=random.uniform(RECONNECT_FROM_S, 0.5),  # type: ignore[arg-type]  # typed int, used as seconds
        reconnect_to_server_handler=reconnect_delay,
        ping_interval=options.ping_s,  # type: ignore[arg-type]  # likewise
        max_outstanding_pings=1,
        pending_size=options.pending_bytes,
        flush_timeout=FLUSH_S,
        **callbacks,  # type: ignore[arg-type]  # their names are the caller's
    )
