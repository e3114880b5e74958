"""Every internal name of SGLang that we lean on, in one place, and the check at start that each is what we think it is.

An upgrade of SGLang starts here: the version is pinned, missing names are listed together, and a hook that SGLang
logged as failed instead of applying (its registry swallows errors) stops the engine before it serves.
"""

import importlib.metadata
import pkgutil
from collections.abc import Iterable
from typing import Any

from services.engine.sglang.config import SGLANG_VERSION

_SRT = "sglang.srt"
SCHEDULER = f"{_SRT}.managers.scheduler.Scheduler"
START_RENDEZVOUS = f"{_SRT}.managers.disagg_service.start_disagg_service"
EVENT_RECORDER = f"{_SRT}.mem_cache.events.KVCacheEventRecorder"
PAGE_HASH = f"{_SRT}.mem_cache.cpp_utils.native_hash.get_native_hash"
TREE = f"{_SRT}.mem_cache.unified_radix_cache.UnifiedRadixCache"
CHECKPOINT = f"{TREE}.checkpoint_into_tree"
LINKER_WRAPPER = f"{_SRT}.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper"
LINKER_MATCH = f"{LINKER_WRAPPER}.match"
OFFLOAD_NODE = f"{LINKER_WRAPPER}._offload_node"
EXTEND_ATTENTION = f"{_SRT}.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_extend"
MOONCAKE_SENDER = f"{_SRT}.disaggregation.mooncake.conn.MooncakeKVSender"

PREFILL_HALF = (
    "waiting_queue",
    "running_batch",
    "last_batch",
    "chunked_req",
    "result_queue",
    "req_to_metadata_buffer_idx_allocator",
    "disagg_metadata_buffers",
)
"""Attributes of the scheduler that belong to one phase; the symmetric scheduler keeps them twice."""

_MEMBERS: dict[str, tuple[str, ...]] = {
    SCHEDULER: (
        "init_disaggregation",
        "init_tokenizer",
        "handle_generate_request",
        "_create_generation_req",
        "_add_request_to_queue",
        "abort_request",
        "send_abort_output",
        "handle_rpc_request",
        "is_fully_idle",
        "on_idle",
        "ingest_requests",
        "run_batch",
        "process_batch_result",
        "process_batch_result_disagg_prefill",
        "get_next_disagg_prefill_batch_to_run",
        "get_next_disagg_decode_batch_to_run",
        "process_disagg_prefill_inflight_queue",
        "process_decode_queue",
        "is_disable_overlap_for_batch",
        "launch_batch_sample_if_needed",
        "_apply_war_barrier",
        "_sync_disaggregation_mode_to_subcomponents",
        "get_output_streamer_class",
        "event_loop_normal_disagg_decode",
        "event_loop_overlap_disagg_decode",
    ),
    f"{_SRT}.disaggregation.prefill.PrefillBootstrapQueue": ("pop_bootstrapped", "add"),
    f"{_SRT}.disaggregation.decode.DecodePreallocQueue": ("prefetch_prefill_dp_rank_queries",),
    f"{_SRT}.managers.scheduler_components.output_streamer.SchedulerOutputStreamer": ("stream_output",),
    TREE: (
        "checkpoint_into_tree",
        "match_prefix",
        "insert",
        "lock",
        "unlock",
        "evict_for_alloc",
        "path_device_indices",
        "get_last_hash_value",
        "_evict_device_leaf",
        "release_radix_session",
    ),
    f"{_SRT}.mem_cache.unified_cache.unified_tree_core.UnifiedTreeCore": (
        "node_by_id",
        "mark_external_cache_stored_path",
        "_is_device_leaf",
    ),
    f"{_SRT}.managers.schedule_batch.Req": ("set_finish_with_abort",),
    f"{_SRT}.managers.schedule_batch.MultimodalDataItem": ("set_hash", "padding_values"),
    f"{_SRT}.managers.schedule_batch.MultimodalProcessorOutput": ("build_padded_input_ids",),
    LINKER_WRAPPER: ("match", "_offload_node", "offload_nodes", "commit_completed_offloads"),
    f"{_SRT}.managers.tokenizer_manager.TokenizerManager": ("generate_request", "abort_request", "close_session"),
    f"{_SRT}.entrypoints.engine.Engine": (
        "_launch_detokenizer_subprocesses",
        "_launch_scheduler_processes",
        "collective_rpc",
        "shutdown",
    ),
}
_SCHEDULER_ATTRIBUTES = (
    *PREFILL_HALF,
    "disaggregation_mode",
    "disagg_prefill_bootstrap_queue",
    "disagg_prefill_inflight_queue",
    "disagg_decode_prealloc_queue",
    "disagg_decode_transfer_queue",
    "tree_cache",
    "token_to_kv_pool_allocator",
    "req_to_token_pool",
    "enable_overlap",
    "gracefully_exit",
    "attn_tp_cpu_group",
    "max_running_requests",
    "max_total_num_tokens",
)


class IncompatibleSglang(RuntimeError):
    """The installed SGLang is not the one this plug-in was written for; the text names what differs."""


def resolve(path: str) -> Any:
    """The object behind a dotted name of this file."""
    return pkgutil.resolve_name(path)


def check_version() -> None:
    """IncompatibleSglang unless the pinned version is installed."""
    found = importlib.metadata.version("sglang")
    if found != SGLANG_VERSION:
        raise IncompatibleSglang(f"sglang {found} is installed, this engine needs exactly {SGLANG_VERSION}")


def check_members() -> None:
    """IncompatibleSglang names every member that is gone. Called before any hook is registered."""
    missing = [
        f"{owner}.{member}" for owner, members in _MEMBERS.items() for member in members if not _has(owner, member)
    ]
    if missing:
        raise IncompatibleSglang(f"sglang {SGLANG_VERSION} lacks {', '.join(missing)}")


def _has(owner: str, member: str) -> bool:
    try:
        return hasattr(resolve(owner), member)
    except (ImportError, AttributeError):
        return False


def check_hooks(targets: Iterable[str], applied: Iterable[str]) -> None:
    """IncompatibleSglang names every hook that SGLang's registry did not apply."""
    missing = sorted(set(targets) - set(applied))
    if missing:
        raise IncompatibleSglang(f"SGLang did not apply the hooks on {', '.join(missing)}")


def check_scheduler(scheduler: Any) -> None:
    """IncompatibleSglang names every attribute that a built scheduler lacks."""
    missing = [name for name in _SCHEDULER_ATTRIBUTES if not hasattr(scheduler, name)]
    if missing:
        raise IncompatibleSglang(f"the scheduler of sglang {SGLANG_VERSION} lacks {', '.join(missing)}")
