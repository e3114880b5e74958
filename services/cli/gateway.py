"""`ei gateway`: the gateway as a process of its own, with a broker or without one."""

import os

import uvicorn

from services.clock import SystemClock
from services.harness.events import branch_event
from services.harness.publisher import Publisher
from services.http_head import BoundedHeads
from services.http_server import IDLE_S
from services.observe import logger
from services.router.gateway.conversations import Said
from services.router.gateway.service import Gateway

SOURCE = "gateway"
STOPPING_S = 10
"""What answers that are under way get to end."""


def run_gateway(upstream: str, host: str, port: int, nats: str | None, log_level: str) -> int:
    """Serve until a signal. `nats` None: EI_NATS_URL; neither: branches are only logged and listed."""
    url = nats or os.environ.get("EI_NATS_URL")
    publisher = Publisher(url, os.environ.get("EI_NATS_NKEY", "")) if url else None
    partition = os.environ.get("EI_PARTITION", "p0")

    def publish(said: Said) -> None:
        assert publisher is not None
        publisher.say(
            branch_event(
                said.branch,
                said.type.value,
                parent=said.parent,
                version=said.version,
                source=SOURCE,
                partition=partition,
            )
        )

    log = logger(SOURCE, level=log_level)
    gateway = Gateway(upstream, log, SystemClock(), publish if publisher is not None else None)
    log.info("gateway", upstream=gateway.upstream, url=f"http://{host}:{port}", broker=url or "none")
    config = uvicorn.Config(
        gateway.app(),
        host=host,
        port=port,
        http=BoundedHeads,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_keep_alive=IDLE_S,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=STOPPING_S,
    )
    try:
        uvicorn.Server(config).run()
    finally:
        if publisher is not None:
            publisher.close()
    return 0
