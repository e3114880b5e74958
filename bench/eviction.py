"""Lost KV reuse by order of eviction on real agents: `python -m bench.eviction [--quick] [--json FILE]`.

One sequence of accesses per trace, recorded with agents in a closed loop, unlimited cache and constant service time,
is replayed with every policy and capacity, by the cores of one pool and one directory in virtual time. Capacities are
shares of the most blocks that active branches claimed at any time. A branch's events reach the directory when they
happen; nothing of the trace's future does. Waits are cut at --longest-wait seconds as in the reference's replay, or
left as recorded (NAME:recorded); then `slept_kept` is the share of its prefix that a branch finds after a wait of 300
to 420 s, and `left_kept` how much is still here of what compactions left behind during these waits.
Traces: {cc_weka042026,synth_cc,synth_putnam,synth_osworld}.btrace.jsonl.gz in --traces, EI_TRACES or data/traces.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.eviction_plot import plot
from bench.eviction_policies import POLICIES
from bench.eviction_replay import Replay
from bench.eviction_sequence import Sequence, record
from bench.eviction_trace import find

CAPACITIES = (0.5, 0.7, 0.85, 1.0, 1.15, 1.5)
CLAUDE_CODE, SMOKE = "cc_weka042026", "cc_smoke"
RECORDED = ":recorded"
"""Behind the name of a trace: waits as recorded, however long."""
SETS = (CLAUDE_CODE, CLAUDE_CODE + RECORDED, "synth_cc", "synth_putnam", "synth_osworld")
RESULTS = Path(__file__).parent / "results"


def replays(sequence: Sequence, policies: list[str], capacities: list[float]) -> Iterator[dict[str, Any]]:
    """One row per policy and capacity; the demand is measured with room for everything."""
    most = Replay(sequence, "count-then-lru", sequence.blocks + 1024).run().most_referenced
    for capacity in capacities:
        for policy in policies:
            began = time.process_time()
            replay = Replay(sequence, policy, max(1, int(capacity * most)))
            figures = replay.run()
            replay.pool.check()
            yield {
                "trace": sequence.name,
                "capacity": capacity,
                "policy": policy,
                "hit": round(figures.hit / figures.prompt, 5),
                "ideal": round(figures.ideal / figures.prompt, 5),
                "lost": round(figures.lost, 6),
                "slept_kept": round(figures.slept_hit / figures.slept_ideal, 4) if figures.slept_ideal else None,
                "left_kept": round(figures.left_kept / figures.left, 4) if figures.left else None,
                "refused": figures.refused,
                "values_told": figures.told_values,
                "demand_blocks": most,
                "cpu_s": round(time.process_time() - began, 1),
            }


def keys(rows: list[dict[str, Any]], trace: str) -> dict[str, float | None]:
    """What the rows of the Claude Code trace come to; None where a row or anything to divide by is missing."""
    lost = {(row["capacity"], row["policy"]): row["lost"] for row in rows if row["trace"] == trace}

    def over_lru(capacity: float) -> float | None:
        ours, lru = lost.get((capacity, "ours")), lost.get((capacity, "lru"))
        return None if ours is None or not lru else round(ours / lru, 4)

    counted, ours, best = (lost.get((0.7, policy)) for policy in ("count-then-lru", "ours", "oracle"))
    closed = None
    if counted is not None and ours is not None and best is not None and counted > best:
        closed = round((counted - ours) / (counted - best), 4)
    return {"lost_ratio_at_1": over_lru(1.0), "lost_ratio_at_085": over_lru(0.85), "oracle_gap_closed_at_07": closed}


def table(rows: list[dict[str, Any]], policies: list[str]) -> str:
    """Lost reuse in percent: a line per trace and capacity."""
    lines = [f"{'lost reuse %':30}" + "".join(f"{policy:>16}" for policy in policies)]
    for trace in dict.fromkeys(row["trace"] for row in rows):
        for capacity in dict.fromkeys(row["capacity"] for row in rows if row["trace"] == trace):
            found = {r["policy"]: r["lost"] for r in rows if (r["trace"], r["capacity"]) == (trace, capacity)}
            cells = "".join(f"{100 * found[p]:16.3f}" if p in found else f"{'':16}" for p in policies)
            lines.append(f"{trace:24}{100 * capacity:4.0f} %" + cells)
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.eviction", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the ten agents of cc_smoke, under 50 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON line there too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a plot there (extra: plots)")
    parser.add_argument("--traces", type=Path, metavar="FOLDER")
    parser.add_argument("--sets", default=",".join(SETS), help="traces to replay, by name")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--capacities", default=",".join(map(str, CAPACITIES)))
    parser.add_argument("--agents", type=int, default=126)
    parser.add_argument("--tokens-per-block", type=int, default=2048, help="a multiple of 64")
    parser.add_argument("--service", type=float, default=10.0, metavar="S", help="seconds from request to answer")
    parser.add_argument("--longest-wait", type=float, default=22.0, metavar="S")
    parser.add_argument("--warm", type=float, default=900.0, metavar="S", help="not scored")
    parser.add_argument("--until", type=float, default=3600.0, metavar="S")
    parser.add_argument("--half", choices=("tuning", "held-out"), help="only every other agent of each trace")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.sets, chosen.agents, chosen.warm, chosen.until = SMOKE, 8, 300.0, 1500.0
    return chosen


def main() -> None:
    chosen = arguments()
    halves = {None: None, "tuning": slice(0, None, 2), "held-out": slice(1, None, 2)}
    names, policies = chosen.sets.split(","), chosen.policies.split(",")
    capacities = [float(capacity) for capacity in chosen.capacities.split(",")]
    rows: list[dict[str, Any]] = []
    for name, path in [(name, find(name.removesuffix(RECORDED), chosen.traces)) for name in names]:
        sequence = record(
            name,
            path,
            agents=chosen.agents,
            tokens_per_block=chosen.tokens_per_block,
            service_s=chosen.service,
            longest_wait_s=float("inf") if name.endswith(RECORDED) else chosen.longest_wait,
            warm_s=chosen.warm,
            until_s=chosen.until,
            plays=halves[chosen.half],
        )
        for row in replays(sequence, policies, capacities):
            rows.append(row)
            print(json.dumps(row), flush=True)
    print(table(rows, policies))
    figures: dict[str, Any] = {
        "rows": rows,
        **keys(rows, SMOKE if chosen.quick else CLAUDE_CODE),
        "agents": chosen.agents,
        "tokens_per_block": chosen.tokens_per_block,
        "service_s": chosen.service,
        "longest_wait_s": chosen.longest_wait,
        "scored_s": [chosen.warm, chosen.until],
        "half": chosen.half,
        "quick": chosen.quick,
    }
    if chosen.plot is not None:
        plot(rows, policies, chosen.plot)
    line = json.dumps(figures)
    if chosen.json is not None:
        chosen.json.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
