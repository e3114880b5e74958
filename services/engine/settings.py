"""Settings of a node's engine service."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from msgspec import Meta, field

from schemas.phase import Phase
from schemas.subjects import NAME
from services.engine.sglang.config import SglangSettings
from services.engine.timed.settings import TimedSettings
from services.settings import ServiceSettings

Seconds = Annotated[float, Meta(gt=0)]


class EngineSettings(ServiceSettings, kw_only=True):
    """One engine per node, of the same `node` name as its pool.

    `engine` chooses the table that counts, `timed` or `sglang`. `phase` holds until the planner's first command.
    `pool_socket` is the Unix socket of the node's pool; empty: no pool, nothing is reused between requests on hosts.
    A fetch is given up when it takes `fetch_grace_s` longer than computing its tokens would. Waiting prefills go in the
    order of arrival + `order_weight` * predicted time (0: first come, first served); the router's has to be the same.
    A peer silent for `node_timeout_s` or a router silent for `router_timeout_s` has lost its requests here.
    """

    service: ClassVar[str] = "engine"

    node: str = "node-0"
    engine: Literal["timed", "sglang"] = "timed"
    phase: Phase = Phase.BOTH
    pool_socket: str = ""
    node_timeout_s: Seconds = 3.0
    router_timeout_s: Seconds = 5.0
    fetch_grace_s: Seconds = 0.05
    ask_timeout_s: Seconds = 0.5
    max_waiting: Annotated[int, Meta(ge=1)] = 4096
    order_weight: Annotated[float, Meta(ge=0)] = 2.0
    timed: TimedSettings = field(default_factory=TimedSettings)
    sglang: SglangSettings = field(default_factory=SglangSettings)

    def __post_init__(self) -> None:
        if not NAME.match(self.node):
            raise ValueError(f"`node` {self.node!r} does not match [a-z0-9-]{{1,63}}")
        if not self.name:
            self.name = f"engine-{self.node}"[:63]
        super().__post_init__()

    @property
    def pool_path(self) -> Path | None:
        """Where the node's pool listens; None without one."""
        return Path(self.pool_socket) if self.pool_socket else None
