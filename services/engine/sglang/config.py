"""Settings of the SGLang backend, and what its launcher hands down to SGLang's own processes."""

from typing import Any

import msgspec

PLUGIN_VARIABLE = "EI_SGLANG_PLUGIN"
"""Holds a `PluginConfig` as JSON in every process of our engines; without it the plug-in does nothing."""
SGLANG_VERSION = "0.5.23"


class SglangSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One SGLang engine. The defaults are those of a machine without GPU.

    `model_path` "" means the bundled model; `model` is the name the pool and the router know it by.
    `l1_tokens` bounds the KV tokens in device memory; None lets SGLang take what `mem_fraction` leaves.
    `chunk_tokens`: a running prefill chunk cannot be cancelled, so keep it short on a CPU.
    `peer_lease_s`: how long pages stay reserved for a peer that was told to stop writing and does not answer.
    `sglang_args` go to SGLang's ServerArgs as they are, over everything we set.
    """

    model: str = "smollm2-135m-instruct"
    model_path: str = ""
    device: str = "cpu"
    dtype: str = "float32"
    attention_backend: str = "torch_native"
    transfer_backend: str = "mooncake_tcp"
    block_size: int = 16
    context_tokens: int = 4096
    l1_tokens: int | None = 12288
    mem_fraction: float = 0.3
    max_running: int = 8
    chunk_tokens: int = 256
    tensor_parallel: int = 1
    threads: int = 1
    overlap: bool = False
    host: str = "127.0.0.1"
    rendezvous_port: int = 0
    session_cache: bool = True
    session_lease_s: float = 1800.0
    idle_poll_s: float = 0.001
    peer_lease_s: float = 10.0
    start_timeout_s: float = 600.0
    stop_timeout_s: float = 20.0
    log_level: str = "warning"
    sglang_args: dict[str, Any] = {}

    def __post_init__(self) -> None:
        for name in ("block_size", "context_tokens", "max_running", "chunk_tokens", "tensor_parallel"):
            if getattr(self, name) < 1:
                raise ValueError(f"sglang.{name} is {getattr(self, name)}, expected at least 1")
        if self.chunk_tokens % self.block_size:
            raise ValueError(f"sglang.chunk_tokens {self.chunk_tokens} is no multiple of block_size {self.block_size}")


class PluginConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the plug-in needs inside SGLang's processes.

    `plain` leaves the stock scheduler in place (CPU hooks only); `cpu_attention` False keeps upstream's own attention
    on a CPU too, to compare with. `channel` is the backend's Unix socket, `pool` that of the node's KV pool ("" without
    one).
    """

    plain: bool
    device: str
    channel: str
    pool: str = ""
    model: str = ""
    key_version: str = ""
    cpu_attention: bool = True
    idle_poll_s: float = 0.001


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the worker process reads from its `--config` file: SGLang's arguments, ready-made."""

    channel: str
    parent: int
    plain: bool
    session_lease_s: float
    server_args: dict[str, Any]


def plugin_config(environ: Any) -> PluginConfig | None:
    """The plug-in's configuration in this process, or None when SGLang runs without us."""
    text = environ.get(PLUGIN_VARIABLE, "")
    return msgspec.json.decode(text, type=PluginConfig) if text else None
