"""Lineage without a word from the harness: `python -m bench.lineage [--quick] [--json FILE] [--trace FILE]`.

A recorded corpus of Claude Code is played in virtual time through the directory core, once with every signal that a
harness can give (branch, version, kind, parent, end) and once with none, on one host memory of a given share of the
peak demand of active branches. Simulated: no engine, no network; the same core that serves.
"""

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.lineage_directory import Told
from bench.lineage_plays import Request, moments, peak_demand
from bench.lineage_pool import Claims, Pool
from schemas.directory import MatchReply
from services.cli.replay.trace import Trace, read_trace

CORPUS = Path("../shared/traces/cc_weka042026.btrace.jsonl.gz")
SMOKE = Path("data/traces/cc_smoke.btrace.jsonl.gz")
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
    agreement: dict[str, list[int]] = field(default_factory=dict)

    @property
    def lost_pct(self) -> float:
        return 100.0 * (1.0 - self.hit_blocks / max(1, self.ideal_blocks))

    @property
    def agreement_pct(self) -> float:
        agreed, seen = (sum(counts[i] for counts in self.agreement.values()) for i in (0, 1))
        return 100.0 * agreed / max(1, seen)


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


def play(trace: Trace, agents: int, policy: str, share: float, demand: tuple[int, int]) -> tuple[Outcome, Judge]:
    """One run of one policy."""
    start = time.process_time()
    outcome, judge = Outcome(policy, share), Judge()
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
                reply = directory.arrives(request, now)
                if policy == "inferred":
                    judge.compare(request, reply)
            continue
        new = pool.write(request.blocks, now)
        claims.answered(request.branch, request.blocks, now, last=request.last)
        for directory in told:
            directory.answered(request, new, now)
        gone = pool.evict()
        for directory in told:
            directory.evicted(gone, now)
    for directory in told:
        directory.tick(now + 2 * LEASE_S)
        directory.core.check()
    if policy == "inferred":
        outcome.agreement = judge.settle(told[-1])
    outcome.evicted_blocks, outcome.evicted_referenced_blocks = pool.evicted, pool.evicted_referenced
    outcome.read_again = pool.read_again
    outcome.seconds = time.process_time() - start
    return outcome, judge


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.lineage")
    parser.add_argument("--quick", action="store_true", help="the ten agents of the smoke trace, one memory size")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trace", type=Path, default=None)
    parser.add_argument("--agents", type=int, default=None)
    parser.add_argument("--plays", type=int, default=None)
    parser.add_argument("--shares", default=None, help="memory over the peak demand of active branches")
    options = parser.parse_args()
    path = options.trace or (SMOKE if options.quick else CORPUS)
    if not path.exists():
        sys.stderr.write(f"bench.lineage: no trace at {path}; give one with --trace\n")
        return 1
    trace = read_trace(path, options.plays)
    agents = options.agents or (5 if options.quick else 90)
    shares = [float(text) for text in (options.shares or "1.16").split(",")]
    demand = peak_demand(trace, agents)
    print(f"{path.name}: {sum(len(p.rows) for p in trace.plays)} requests of {len(trace.plays)} agents, {agents} at a")
    print(f"time, peak demand of active branches {demand[0] * trace.block_size:,} tokens; simulated")
    rows, judged = [], []
    for share in shares:
        for policy in POLICIES:
            outcome, judge = play(trace, agents, policy, share, demand)
            rows.append(outcome)
            if policy == "inferred":
                judged.append((outcome, judge))
            print(
                f"memory {share:4.2f} {policy:9} lost reuse {outcome.lost_pct:6.3f} %  hit "
                f"{100 * outcome.hit_blocks / outcome.prompt_blocks:6.2f} %  wrongly dropped and read again "
                f"{outcome.read_again}  ({outcome.seconds:.0f} s of CPU)",
                flush=True,
            )
    outcome, judge = judged[-1]
    print(f"agreement {outcome.agreement_pct:.2f} %: {outcome.agreement}")
    print(f"disagreements (recorded, taken for): {dict(judge.confusion.most_common(8))}")
    lost = {(row.policy, row.share): row.lost_pct for row in rows}
    ratios = {str(share): lost["inferred", share] / max(1e-9, lost["signals", share]) for share in shares}
    result = {
        "bench": "lineage",
        "quick": options.quick,
        "trace": path.name,
        "requests": outcome.requests,
        "agents": agents,
        "agreement_pct": outcome.agreement_pct,
        "agreement": outcome.agreement,
        "lost_ratio": ratios,
        "read_again": max(row.read_again for row in rows if row.policy == "inferred"),
        "rows": [asdict(row) | {"lost_pct": row.lost_pct} for row in rows],
    }
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
