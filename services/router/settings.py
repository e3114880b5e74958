"""Settings of `ei-router`."""

from typing import ClassVar

import msgspec

from services.router.core.admission import Limits
from services.router.core.identity_volatile import ATTRIBUTION
from services.router.core.placement import FetchCost
from services.router.core.timing import Coefficients
from services.settings import ServiceSettings


class RouterSettings(ServiceSettings, kw_only=True):
    """Durations in seconds.

    `tokenizer`: `byte` or a model folder; empty: what the nodes' hello names. `model_name`: the id that
    clients ask for; empty: the model of the nodes. `max_context_tokens` 0: what the nodes can hold.
    `default_max_tokens`: length of a chat answer whose request names none. `ttft_bound_s`: predicted time to first
    token above which a request is turned away; absent: never. `keys_file`: TOML with API keys; empty: everybody is the
    default tenant. `fetch_tokens_per_s` and `fetch_latency_s`: moving KV between the host memories of two nodes.
    `handoff_tokens_per_s`: moving it from the device of one to that of another. `order_weight` is that of the engines.
    `resume_tokens`: longest prefill that a decode node may do whose device holds the rest of the prompt, where that is
    predicted faster, the delay of those that decode there counted; 0: never.
    `idle_client_s` and `client_backlog_bytes`: a client that takes nothing for so long, or lets so much pile up, is
    cancelled. `keep_alive_s`: a stream without tokens gets a comment this often. `volatile_prefixes`: a first system
    block that begins with one of them changes with every request and is dropped. `tool_parser`, `reasoning_parser`:
    SGLang's names of the parsers for this model's answers; empty: found from its chat template. `model_aliases`: other
    names clients may ask for, with wildcards, such as "claude-*"; they get the one model there is. `images_limit`:
    images of one request; `image_limit_bytes`, `image_limit_pixels`: of each.
    """

    service: ClassVar[str] = "router"

    name: str = "r0"
    http_port: int = 8000
    tokenizer: str = ""
    model_name: str = ""
    model_aliases: list[str] = msgspec.field(default_factory=list)
    tool_parser: str = ""
    reasoning_parser: str = ""
    keys_file: str = ""
    max_context_tokens: int = 0
    max_open_requests: int = 4096
    default_max_tokens: int = 2048
    ttft_bound_s: float | None = None
    request_timeout_s: float = 3600.0
    node_timeout_s: float = 3.0
    match_timeout_s: float = 0.02
    serve_timeout_s: float = 1.0
    broker_timeout_s: float = 2.0
    keep_alive_s: float = 10.0
    idle_client_s: float = 30.0
    client_backlog_bytes: int = 1 << 20
    body_limit_bytes: int = 32 << 20
    images_limit: int = 100
    image_limit_bytes: int = 10 << 20
    image_limit_pixels: int = 40_000_000
    coefficients: Coefficients = msgspec.field(default_factory=Coefficients)
    fetch_tokens_per_s: float = 2.3e6
    fetch_latency_s: float = 0.002
    handoff_tokens_per_s: float = 2e6
    order_weight: float = 2.0
    resume_tokens: int = 512
    volatile_prefixes: list[str] = msgspec.field(default_factory=lambda: [ATTRIBUTION])

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in (
            "max_open_requests",
            "default_max_tokens",
            "request_timeout_s",
            "node_timeout_s",
            "match_timeout_s",
            "serve_timeout_s",
            "broker_timeout_s",
            "keep_alive_s",
            "idle_client_s",
            "client_backlog_bytes",
            "body_limit_bytes",
            "images_limit",
            "image_limit_bytes",
            "image_limit_pixels",
            "fetch_tokens_per_s",
            "handoff_tokens_per_s",
        ):
            if getattr(self, key) <= 0:
                raise ValueError(f"`{key}` {getattr(self, key)} is not above 0")
        if self.ttft_bound_s is not None and self.ttft_bound_s <= 0:
            raise ValueError(f"`ttft_bound_s` {self.ttft_bound_s} is not above 0")

    def limits(self) -> Limits:
        return Limits(self.max_context_tokens, self.max_open_requests, self.ttft_bound_s)

    def fetch_cost(self) -> FetchCost:
        return FetchCost(self.fetch_tokens_per_s, self.fetch_latency_s)

    def handoff_cost(self) -> FetchCost:
        return FetchCost(self.handoff_tokens_per_s, 0.0)
