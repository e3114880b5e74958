"""The entry point `sglang.srt.plugins: evolving-infra`: hooks that make SGLang symmetric. Inert without our variable.

SGLang calls `install` in each of its processes before it builds anything. Errors raised here are only logged by
SGLang, so the worker and the scheduler call `verify` themselves and refuse to start when a hook is missing.
"""

import ctypes
import os
import signal
from typing import Any

from services.engine.sglang.config import PluginConfig, plugin_config

_PR_SET_PDEATHSIG = 1


def install() -> None:
    """Register our hooks with SGLang if this process belongs to one of our engines."""
    config = plugin_config(os.environ)
    if config is None:
        return
    die_with_parent()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from services.engine.sglang import names

    names.check_version()
    if config.device == "cpu" and config.cpu_attention:
        from services.engine.sglang import cpu

        HookRegistry.register(names.EXTEND_ATTENTION, cpu.extend_attention, HookType.AROUND)
    if not config.plain:
        if config.device == "cpu":
            names.resolve(names.MOONCAKE_SENDER).supports_host_tensor_indices = False  # its other path needs CUDA
        names.check_members()
        _make_symmetric(HookRegistry, HookType)


def _make_symmetric(registry: Any, kind: Any) -> None:
    from services.engine.sglang import device_events, linker, names, page_hash, symmetric

    registry.register(names.SCHEDULER, symmetric.SymmetricScheduler, kind.REPLACE)
    registry.register(names.START_RENDEZVOUS, symmetric.start_rendezvous, kind.AROUND)
    registry.register(names.EVENT_RECORDER, device_events.DeviceEventRecorder, kind.REPLACE)
    registry.register(names.PAGE_HASH, page_hash.page_hashes, kind.REPLACE)
    registry.register(names.CHECKPOINT, linker.around_checkpoint, kind.AROUND)
    registry.register(names.LINKER_MATCH, linker.match_device_only, kind.REPLACE)
    registry.register(names.OFFLOAD_NODE, linker.around_offload_node, kind.AROUND)


def expected_hooks(config: PluginConfig) -> set[str]:
    """The hooks that must be in place in a process with this configuration."""
    from services.engine.sglang import names

    hooks = {names.EXTEND_ATTENTION} if config.device == "cpu" and config.cpu_attention else set()
    if not config.plain:
        hooks |= {
            names.SCHEDULER,
            names.START_RENDEZVOUS,
            names.EVENT_RECORDER,
            names.PAGE_HASH,
            names.CHECKPOINT,
            names.LINKER_MATCH,
            names.OFFLOAD_NODE,
        }
    return hooks


def verify(config: PluginConfig) -> None:
    """IncompatibleSglang unless every hook took effect. Call it after SGLang loaded its plug-ins."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from services.engine.sglang import names

    names.check_version()
    names.check_hooks(expected_hooks(config), HookRegistry._patched)


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it dies (Linux); at once if it is dead already."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent or parent == 1:
        os._exit(1)
