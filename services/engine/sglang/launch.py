"""How an SGLang engine of ours is started: its arguments, its environment, its free ports."""

import importlib.util
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from services.engine.sglang.config import PLUGIN_VARIABLE, PluginConfig, SglangSettings

_STUBS = Path(__file__).parent / "cpu_stubs"
_LINK = "services.engine.sglang.linker"
_PEER_HEARTBEAT_S = 2.0
"""A decode engine asks the rendezvous of each prefill engine it waits for this often; two failures: it is dead."""


def free_port(host: str) -> int:
    """A TCP port that is free now; whoever binds it first has it."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def server_args(settings: SglangSettings, model_path: Path, *, plain: bool, rendezvous_port: int) -> dict[str, Any]:
    """SGLang's ServerArgs: of one half of everything for a symmetric engine, of a stock one when `plain`."""
    arguments: dict[str, Any] = {
        "model_path": str(model_path),
        "served_model_name": settings.model,
        "device": settings.device,
        "dtype": settings.dtype,
        "attention_backend": settings.attention_backend,
        "tp_size": settings.tensor_parallel,
        "host": settings.host,
        "page_size": settings.block_size,
        "context_length": settings.context_tokens,
        "mem_fraction_static": settings.mem_fraction,
        "max_running_requests": settings.max_running,
        "chunked_prefill_size": settings.chunk_tokens,
        "max_prefill_tokens": settings.chunk_tokens,
        "disable_overlap_schedule": not settings.overlap,
        "skip_tokenizer_init": True,
        "sleep_on_idle": True,
        "random_seed": 1,
        "log_level": settings.log_level,
    }
    if settings.device == "cpu" and importlib.util.find_spec("torchvision") is None:
        arguments["image_processor_backend"] = "pil"  # a stand-in of ours has the other one's name
    if settings.l1_tokens is not None:
        arguments["max_total_tokens"] = settings.l1_tokens
    if not plain:
        arguments |= {
            "disaggregation_mode": "decode",
            "disaggregation_decode_enable_radix_cache": True,
            "disaggregation_transfer_backend": settings.transfer_backend,
            "disaggregation_bootstrap_port": rendezvous_port,
            "num_reserved_decode_tokens": settings.block_size,
            "enable_session_radix_cache": settings.session_cache,
            "enable_unified_cache_external_linker": True,
            "unified_cache_external_linker_backend": "dynamic",
            "unified_cache_external_linker_config": {
                "linker": "ArenaLinker",
                "linker_module_path": _LINK,
                "linker_extra_config": {},
            },
        }
    return arguments | settings.sglang_args


def environment(
    settings: SglangSettings, plugin: PluginConfig, scratch: Path, inherited: Mapping[str, str]
) -> dict[str, str]:
    """The environment of the worker and of all that SGLang spawns; `scratch` takes its sockets and temporary files."""
    environ = dict(inherited)
    environ[PLUGIN_VARIABLE] = msgspec.json.encode(plugin).decode()
    environ |= {
        "TMPDIR": str(scratch),
        "OMP_NUM_THREADS": str(settings.threads),
        "HF_HUB_OFFLINE": "1",
        "GLOG_minloglevel": "2",
        "TOKENIZERS_PARALLELISM": "false",
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
        "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": str(_PEER_HEARTBEAT_S),
        "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": str(settings.peer_lease_s),
    }
    environ.pop("SGLANG_PLUGINS", None)
    if settings.device == "cpu":
        environ["SGLANG_USE_CPU_ENGINE"] = "1"
        environ["SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"] = "0"  # needs CUDA events
        cores = os.cpu_count() or 1
        bound = "|".join(str(rank % cores) for rank in range(settings.tensor_parallel))
        if settings.tensor_parallel > 1:
            environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", bound)
        paths = [str(_STUBS), environ.get("PYTHONPATH", "")]
        environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return environ
