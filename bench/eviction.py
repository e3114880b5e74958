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
from functools import partial
from pathlib import Path
from typing import Any

from bench.eviction_plot import plot
from bench.eviction_policies import POLICIES
from bench.eviction_rows import Kept, Row, Setting, keys, replays, table
from bench.eviction_sequence import record
from bench.eviction_trace import find

CAPACITIES = (0.5, 0.7, 0.85, 1.0, 1.15, 1.5)
RECORDED = ":recorded"
"""Behind the name of a trace: waits as recorded, however long."""
CLAUDE_CODE, SMOKE = "cc_weka042026", "cc_smoke"
SCORED_S = {
    CLAUDE_CODE: (900.0, 2100.0),
    CLAUDE_CODE + RECORDED: (1500.0, 5000.0),
    "synth_cc": (700.0, 1300.0),
    "synth_putnam": (600.0, 1500.0),
    "synth_osworld": (600.0, 1200.0),
    SMOKE: (300.0, 1500.0),
}
"""From the end of warm-up on; short, because every block of every request passes through the cores in Python."""
HALVES = {"": None, "tuning": slice(0, None, 2), "held-out": slice(1, None, 2)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.eviction", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the ten agents of cc_smoke, under 50 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON line there too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a plot there (extra: plots)")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="finished rows are kept there and not repeated")
    parser.add_argument("--kept-only", action="store_true", help="report what --keep has, replay nothing")
    parser.add_argument("--traces", type=Path, metavar="FOLDER")
    parser.add_argument("--sets", default=",".join(name for name in SCORED_S if name != SMOKE))
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--capacities", default=",".join(map(str, CAPACITIES)))
    parser.add_argument("--agents", type=int, default=126)
    parser.add_argument("--tokens-per-block", type=int, default=4096, help="a multiple of 64")
    parser.add_argument("--service", type=float, default=10.0, metavar="S", help="seconds from request to answer")
    parser.add_argument("--longest-wait", type=float, default=22.0, metavar="S")
    parser.add_argument("--half", choices=HALVES, default="", help="only every other agent of each trace")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.sets, chosen.agents = SMOKE, 8
    return chosen


def main() -> None:
    chosen = arguments()
    policies = chosen.policies.split(",")
    capacities = [float(capacity) for capacity in chosen.capacities.split(",")]
    kept = Kept(chosen.keep)
    rows: list[Row] = kept.rows() if chosen.kept_only else []
    names = [] if chosen.kept_only else chosen.sets.split(",")
    sets = [(name, find(name.removesuffix(RECORDED), chosen.traces)) for name in names]
    for name, path in sets:
        setting = Setting(
            trace=name,
            agents=chosen.agents,
            tokens_per_block=chosen.tokens_per_block,
            service_s=chosen.service,
            longest_wait_s=float("inf") if name.endswith(RECORDED) else chosen.longest_wait,
            warm_s=SCORED_S[name][0],
            until_s=SCORED_S[name][1],
            plays=chosen.half,
        )
        recorded = partial(record, path, **setting._asdict() | {"plays": HALVES[chosen.half]})
        for row in replays(setting, recorded, policies, capacities, kept):
            rows.append(row)
            print(f"{row['trace']} {row['capacity']} {row['policy']}: lost {row['lost']}", flush=True)
    print(table(rows, policies))
    figures: dict[str, Any] = {
        "rows": rows,
        **keys(rows, SMOKE if chosen.quick else CLAUDE_CODE),
        "tokens_per_block": chosen.tokens_per_block,
        "service_s": chosen.service,
        "longest_wait_s": chosen.longest_wait,
        "scored_s": {name: SCORED_S[name] for name in dict.fromkeys(row["trace"] for row in rows)},
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
