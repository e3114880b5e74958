"""Lineage without a word from the harness: `python -m bench.lineage [--quick] [--json FILE] [--trace FILE]`.

A recorded corpus of Claude Code is played in virtual time through the directory core, once with every signal that a
harness can give (branch, version, kind, parent, end) and once with none, on one host memory of a given share of the
peak demand of active branches. Simulated: no engine, no network; the same core that serves.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.lineage_directory import Told
from bench.lineage_plays import Request, moments, peak_demand
from bench.lineage_pool import Claims, Pool
from schemas.directory import MatchReply
from services.btrace import Trace, read_trace

TRACES = Path(__file__).parents[1] / "data" / "traces"
CORPUS, SMOKE = "cc_weka042026.btrace.jsonl.gz", "cc_smoke.btrace.jsonl.gz"
LEASE_S = 1800.0
TICK_S = 10.0
POLICIES = ("signals", "inferred", "lru")


@dataclass
class Outcome:
    """One run, in blocks of 64 tokens; `read_again`: dropped by a wrong guess and read again within the lease."""

    policy: str
    share: float
    requests: int = 0
    prompt_blocks: int = 0
    hit_blocks: int = 0
    ideal_blocks: int = 0
    evicted_blocks: int = 0
    evicted_referenced_blocks: int = 0
    read_again: int = 0
    seconds: float = 0.0

    @property
    def lost_pct(self) -> float:
        return 100.0 * (1.0 - self.hit_blocks / max(1, self.ideal_blocks))


class Judge:
    """Compares what the directory took each request for with what was recorded.

    A request that goes on must go on in the branch that its branch was taken for last. What begins a branch by its own
    lights is judged when the directory has settled it, at the latest when all leases are over: a compaction is a new
    context that goes on a former one's versions, a fork names its parent, anything else begins anew.
    """

    def __init__(self) -> None:
        self._now: dict[str, str] = {}
        self._begun: list[tuple[str, str, str | None]] = []
        self._seen: Counter[str] = Counter()
        self._agreed: Counter[str] = Counter()
        self.confusion: Counter[tuple[str, str]] = Counter()

    def compare(self, request: Request, reply: MatchReply) -> bool | None:
        """Whether it agrees; None while that is open."""
        op, branch = request.row.op.value, reply.branch or ""
        former, parent = self._now.get(request.branch), self._now.get(request.parent or "")
        self._now[request.branch] = branch
        if reply.lineage == "extends":
            return self._count(op, "extends", agrees=op == "append" and branch == former)
        if op == "append":
            return self._count(op, reply.lineage, agrees=False)
        self._begun.append((op, branch, parent if op == "fork" else former))
        return None

    def settle(self, told: Told) -> dict[str, list[int]]:
        """[agreed, seen] by recorded operation, once all leases are over."""
        for op, name, expected in self._begun:
            branch = told.core.branches.get(("", name))
            parent = branch.parent[1] if branch is not None and branch.parent is not None else None
            taken = "opens" if parent is None else "compact" if branch is not None and branch.version else "fork"
            right = {"compact": "compact", "fork": "fork"}.get(op, "opens")
            self._count(op, taken, agrees=taken == right and (right == "opens" or parent == expected))
        return {op: [self._agreed[op], seen] for op, seen in sorted(self._seen.items())}

    def _count(self, op: str, taken: str, *, agrees: bool) -> bool:
        self._seen[op] += 1
        self._agreed[op] += agrees
        self.confusion[op, taken] += not agrees
        return agrees


def agreement(trace: Trace, agents: int) -> tuple[dict[str, list[int]], Judge]:
    """What requests without signals are taken for, whatever the memory."""
    told, judge = Told(None, LEASE_S, signals=False), Judge()
    ticked = now = 0.0
    for moment in moments(trace, agents):
        now, request = moment.at, moment.request
        if now - ticked > TICK_S:
            ticked = now
            told.tick(now)
        if moment.ended:
            told.answered(request, [], now)
        else:
            judge.compare(request, told.arrives(request, now))
    told.tick(now + 2 * LEASE_S)
    return judge.settle(told), judge


def play(trace: Trace, agents: int, policy: str, share: float, demand: tuple[int, int]) -> Outcome:
    """One run of one policy on one memory."""
    start = time.process_time()
    outcome = Outcome(policy, share)
    pool = Pool(demand[1], max(1, int(share * demand[0])))
    told = [] if policy == "lru" else [Told(pool.referenced, LEASE_S, signals=policy == "signals")]
    claims = Claims(pool.claimed, LEASE_S)
    ticked = now = 0.0
    for moment in moments(trace, agents):
        now, request = moment.at, moment.request
        if now - ticked > TICK_S:
            ticked = now
            claims.tick(now)
            for directory in told:
                directory.tick(now)
        if not moment.ended:
            claims.asked(request.branch, now)
            hit, ideal = pool.read(request.blocks, now, LEASE_S)
            outcome.requests += 1
            outcome.prompt_blocks += len(request.blocks)
            outcome.hit_blocks += hit
            outcome.ideal_blocks += ideal
            for directory in told:
                directory.arrives(request, now)
            continue
        new = pool.write(request.blocks, now)
        claims.answered(request.branch, request.blocks, now, last=request.last)
        for directory in told:
            directory.answered(request, new, now)
        gone = pool.evict()
        for directory in told:
            directory.evicted(gone, now)
    outcome.evicted_blocks, outcome.evicted_referenced_blocks = pool.evicted, pool.evicted_referenced
    outcome.read_again = pool.read_again if told else 0
    outcome.seconds = time.process_time() - start
    return outcome


def options_of(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.lineage")
    parser.add_argument("--quick", action="store_true", help="the ten agents of the smoke trace, five at a time")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trace", type=Path, help=f"default: {CORPUS} in EI_TRACES or data/traces (see its README)")
    parser.add_argument("--agents", type=int, default=None, help="agents at a time (90)")
    parser.add_argument(
        "--plays", type=int, default=None, help="so many agents of the trace for the runs with a memory"
    )
    parser.add_argument("--shares", default="1.16", help="memory over the peak demand of active branches")
    found = parser.parse_args(arguments)
    corpus = Path(os.environ.get("EI_TRACES", TRACES)) / CORPUS
    found.trace = found.trace or (TRACES / SMOKE if found.quick else corpus)
    found.agents = found.agents or (5 if found.quick else 90)
    found.shares = [float(text) for text in found.shares.split(",")]
    return found


def memories(trace: Trace, options: argparse.Namespace) -> list[Outcome]:
    """All policies at all sizes, each said as soon as it is done."""
    demand = peak_demand(trace, options.agents)
    print(
        f"{sum(len(play.rows) for play in trace.plays)} requests of {len(trace.plays)} agents, {options.agents} at a "
        f"time, peak demand of active branches {demand[0] * trace.block_size:,} tokens; simulated"
    )
    rows = []
    for share in options.shares:
        for policy in POLICIES:
            outcome = play(trace, options.agents, policy, share, demand)
            rows.append(outcome)
            print(
                f"memory {share:4.2f} {policy:9} lost reuse {outcome.lost_pct:6.3f} %  hit "
                f"{100 * outcome.hit_blocks / outcome.prompt_blocks:6.2f} %  wrongly dropped and read again "
                f"{outcome.read_again}  ({outcome.seconds:.0f} s of CPU)",
                flush=True,
            )
    return rows


def main() -> int:
    options = options_of(sys.argv[1:])
    if not options.trace.exists():
        sys.stderr.write(f"bench.lineage: no trace at {options.trace}; give one with --trace\n")
        return 1
    trace = read_trace(options.trace)
    counts, judge = agreement(trace, options.agents)
    agreed, seen = (sum(pair[i] for pair in counts.values()) for i in (0, 1))
    print(f"{options.trace.name}: {seen} requests, inferred as recorded {100 * agreed / seen:.2f} %: {counts}")
    wrong = {f"{op} taken for {taken}": number for (op, taken), number in judge.confusion.most_common(8) if number}
    print(f"others: {wrong}", flush=True)
    rows = memories(trace if options.plays is None else Trace(trace.block_size, trace.plays[: options.plays]), options)
    lost = {(row.policy, row.share): row.lost_pct for row in rows}
    result = {
        "bench": "lineage",
        "quick": options.quick,
        "trace": options.trace.name,
        "requests": seen,
        "agents": options.agents,
        "agreement_pct": 100 * agreed / seen,
        "agreement": counts,
        "disagreements": wrong,
        "memory_requests": rows[0].requests,
        "lost_ratio": {str(s): lost["inferred", s] / max(1e-9, lost["signals", s]) for s in options.shares},
        "read_again": max(row.read_again for row in rows if row.policy == "inferred"),
        "rows": [asdict(row) | {"lost_pct": row.lost_pct} for row in rows],
    }
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
