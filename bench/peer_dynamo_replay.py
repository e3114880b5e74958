"""Dynamo's side of the comparison, one run in a process that has its wheels: a `Job` as JSON in, its figures out."""

import os
import sys
from typing import Any

import msgspec

from bench.peer_dynamo_figures import Served, figures
from bench.peer_dynamo_policy import CorePolicy
from bench.peer_dynamo_standins import stand_in, used
from schemas.phase import Split

CONTEXT_TOKENS = 262_144
NO_PLANNER, THEIRS, OURS = "none", "dynamo", "ours"


Change = tuple[float, str, int, int]
"""Seconds, kind of worker, how many there were, how many were ordered."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    `host_blocks`: host memory of a prefill worker (0: no tier), `host_gb_s` its link, each way; `startup_s`: of one
    that is added; `decode_shares`: decode workers keep a prefix of several requests once; `planner`: none, dynamo
    (throughput target, all workers pinned) or ours.
    """

    trace: str
    split: str
    width: int
    warm_up_s: float
    ends_s: float
    device_blocks: int
    block_tokens: int
    batch_tokens: int
    host_blocks: int = 0
    host_gb_s: float = 0.0
    kv_bytes_per_token: int = 0
    decode_shares: bool = True
    planner: str = NO_PLANNER
    startup_s: float = 0.0


def engine_of(job: Job, role: str) -> dict[str, Any]:
    """The mocker's arguments for a worker of a role; its times are the default polynomial."""
    engine: dict[str, Any] = {
        "backend": "vllm",
        "num_gpu_blocks": job.device_blocks,
        "block_size": job.block_tokens,
        "max_num_batched_tokens": job.batch_tokens,
        "max_model_len": CONTEXT_TOKENS,
        "worker_type": role,
        "enable_prefix_caching": role == "prefill" or job.decode_shares,
    }
    if job.host_blocks and role == "prefill":
        engine["kv_cache_bytes_per_token"] = job.kv_bytes_per_token
        engine["native_host_offload"] = {
            "scope": "dp_rank_local",
            "num_host_blocks": job.host_blocks,
            "d2h_bandwidth_gbps": job.host_gb_s,
            "h2d_bandwidth_gbps": job.host_gb_s,
        }
    return {
        "engine": engine,
        "num_gpu_blocks_is_explicit": True,
        **({"startup_time": job.startup_s} if job.startup_s else {}),
    }


def planner_config(split: Split) -> dict[str, Any]:
    """Dynamo's planner with its default target and every worker pinned: it may only move them."""
    workers = split.prefill + split.decode
    return {
        "mode": "disagg",
        "backend": "mocker",
        "optimization_target": "throughput",
        "max_gpu_budget": workers,
        "min_gpu_budget": workers,
    }


def served_of(records: list[dict[str, Any]]) -> list[Served]:
    """Answered requests of the replay's own records."""
    return [
        Served(
            record["arrival_time_ms"] / 1e3,
            record["destination_activated_ms"] / 1e3,
            record["terminal_time_ms"] / 1e3,
            record["input_length"],
            record["reused_input_tokens"],
        )
        for record in records
        if record["terminal_status"] == "completed"
    ]


def run(job: Job) -> dict[str, Any]:
    """The figures of one run, and `wall_s` of the replay itself."""
    from dynamo.replay import api  # type: ignore[import-not-found]  # an optional peer

    split = Split.parse(job.split)
    options: dict[str, Any] = {
        "prefill_engine_args": engine_of(job, "prefill"),
        "decode_engine_args": engine_of(job, "decode"),
        "num_prefill_workers": split.prefill,
        "num_decode_workers": split.decode,
        "replay_concurrency": job.width,
        "router_mode": "kv_router",
        "trace_block_size": job.block_tokens,
        "max_sim_time_ms": 1e3 * job.ends_s,
        "capture_per_request": True,
    }
    more: dict[str, Any] = {}
    changes: list[Change] = []
    if job.planner == OURS:
        policy = CorePolicy(split, job.width, job.device_blocks * job.block_tokens, job.batch_tokens, job.block_tokens)
        report = api._run_mocker_trace_replay([job.trace], scaling_policy=policy, **options)
        changes, more = policy.changes, {"decisions": policy.decisions}
    elif job.planner == THEIRS:
        report = api.run_trace_replay(
            job.trace, planner_config=planner_config(split), capture_planner_details=False, **options
        )
        events = report.planner.scaling_events
        changes = [(event.at_s, event.component, event.from_count, event.to_count) for event in events]
    else:
        report = api.run_trace_replay(job.trace, **options)
    found = figures(served_of(report.per_request), job.warm_up_s, job.ends_s)
    ends = {"prefill": split.prefill, "decode": split.decode} | {kind: after for _, kind, _, after in changes}
    return {
        **found,
        **more,
        "switches": float(sum(max(0, after - before) for _, _, before, after in changes)),
        "changes": changes,
        "split": str(Split(ends["prefill"], ends["decode"])),
        "wall_s": report.summary["wall_time_ms"] / 1e3,
    }


def main() -> int:
    os.environ.setdefault("DYN_LOG", "error")
    stand_in()
    found = run(msgspec.json.decode(sys.stdin.buffer.read(), type=Job))
    if used:
        raise SystemExit(f"Dynamo called what is only stood in for: {', '.join(used)}")
    sys.stdout.write("\n" + msgspec.json.encode(found).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
