"""Dynamo 1.6.1's own replay beside our simulator: `python -m bench.peer_dynamo [--quick] [--json FILE]`.

Recorded Claude Code branches as sessions in a closed loop, the mocker's times and capacities on nine workers, on both
sides (`peer_dynamo_trace`, profile `dynamo-mocker`). First both run the same static splits, which shows how far the
simulators agree: `static_disagreement_pct`, the largest difference in throughput or mean E2E. Then each adapts from
6P3D: Dynamo's planner and KV router in its replay and as our file of them in our simulator, and ours. Last, our planner
core takes the place of Dynamo's planner inside Dynamo's replay. Everything is simulated. Medians of three runs: the
replay breaks ties at random, ours has a seed; `spread_pct` says how far apart the runs lie. 35 minutes of virtual time,
the first 10 not scored. `--quick`: one run, 15 minutes, 5 not scored. The file has what is done after every case.

The wheels need not be installed here: `--peer-path DIR` names where `pip install --target` put them.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.peer_dynamo_cases import STATIC, Case, cases
from bench.peer_dynamo_figures import differences, middle
from bench.peer_dynamo_ours import HARDWARE, Load, simulate
from bench.peer_dynamo_replay import Job
from bench.peer_dynamo_trace import Session, sessions_of, write_mooncake
from services.simulator.hardware import PROFILES
from services.simulator.trace import load_trace

REPOSITORY = Path(__file__).parents[1]
TRACE = REPOSITORY / "data" / "traces" / "cc_weka042026.btrace.jsonl.gz"
RESULTS = Path(__file__).parent / "results" / "peer_dynamo.json"
PEER_PLACES = ".cache/dynamo/lib/python3*/site-packages"
"""Where the peer of bench.tokens lies, if it was installed."""
NEEDS = """bench.peer_dynamo needs Dynamo 1.6.1's wheels, here or aside:
  pip install --no-deps --target DIR ai-dynamo-runtime==1.6.1 ai-dynamo==1.6.1
  python -m bench.peer_dynamo --peer-path DIR
What else it imports is in requirements/bench-dynamo.txt (most of it is here already)."""
BLOCK_TOKENS, WIDTH, SESSIONS = 64, 80, 400
MOST_TOKENS, MAX_PAUSE_S = 100_000, 22.0
RUNS = 3
FULL, QUICK = Load(WIDTH, 600.0, 2100.0), Load(WIDTH, 300.0, 900.0)
Row = dict[str, Any]


def replay(job: Job, peer_path: str) -> Row:
    """One run of Dynamo's replay, in a process of its own."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), peer_path]))
    done = subprocess.run(
        [sys.executable, "-m", "bench.peer_dynamo_replay"],
        input=msgspec.json.encode(job),
        capture_output=True,
        env=os.environ | {"PYTHONPATH": path, "DYN_LOG": "error"},
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"Dynamo's replay failed: {done.stderr.decode(errors='replace')[-2000:]}")
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def job_of(case: Case, trace: Path, load: Load) -> Job:
    """A case as Dynamo's replay runs it, with what our profile says of a node."""
    assert case.replay is not None
    hardware = PROFILES[HARDWARE]
    return Job(
        trace=str(trace),
        split=case.split,
        width=load.width,
        warm_up_s=load.warm_up_s,
        ends_s=load.ends_s,
        device_blocks=hardware.l1_tokens // BLOCK_TOKENS,
        block_tokens=BLOCK_TOKENS,
        batch_tokens=hardware.batch_tokens,
        host_blocks=hardware.l2_tokens // BLOCK_TOKENS if case.host else 0,
        host_gb_s=hardware.restore / 1e9,
        kv_bytes_per_token=hardware.kv_bytes_per_token,
        decode_shares=case.decode_shares,
        planner=case.replay,
        startup_s=case.startup_s,
    )


def run_case(case: Case, sessions: Sequence[Session], trace: Path, peer_path: str, load: Load, runs: int) -> Row:
    """Both sides of a case, as medians, and how far ours is from Dynamo's replay where both have it."""
    row: Row = {"part": case.part, "case": case.name, "start": case.split, "runs": runs}
    if case.replay is not None:
        each = [replay(job_of(case, trace, load), peer_path) for _ in range(runs)]
        row["dynamo"] = {**middle(each), "splits": [run["split"] for run in each], "changes": each[0]["changes"]}
        row["dynamo"] |= {"decisions": each[0]["decisions"]} if "decisions" in each[0] else {}
    if case.system is not None:
        each = [simulate(case.system(), case.split, sessions, load, seed) for seed in range(1, runs + 1)]
        row["simulator"] = {**middle(each), "splits": [run["split"] for run in each]}
    if "dynamo" in row and "simulator" in row:
        row["difference"] = differences(row["simulator"], row["dynamo"])
    return row


def show(row: Row) -> None:
    """A line for each side of a case."""
    for side in ("dynamo", "simulator"):
        if side in row:
            found = row[side]
            print(
                f"{row['case']:58}{row['start']:5} {side:10}{found['rps']:6.2f} req/s  "
                f"TTFT {found['ttft_mean_s']:6.2f} P95 {found['ttft_p95_s']:6.2f}  "
                f"E2E {found['e2e_mean_s']:6.2f} s  reuse {found['reuse_pct']:5.1f} %  "
                f"moves {found['switches']:3.0f}, ends {'/'.join(sorted(set(found['splits'])))}  "
                f"spread {found['spread_pct']['rps']:.1f} % req/s, {found['spread_pct']['ttft_mean_s']:.0f} % TTFT"
            )
    if "difference" in row:
        off = row["difference"]
        print(
            f"{'':63}{'differs by':10}{off['rps']:+6.1f} %     TTFT {off['ttft_mean_s']:+5.1f} %"
            f"             E2E {off['e2e_mean_s']:+5.1f} %  reuse {off['reuse_points']:+5.1f} points"
        )
    sys.stdout.flush()


def agreement(rows: Sequence[Row]) -> Row:
    """The largest differences over the static splits."""
    off = [row["difference"] for row in rows if row["part"] == STATIC]
    return {
        "static_disagreement_pct": max(abs(one[name]) for one in off for name in ("rps", "e2e_mean_s")),
        "static_ttft_disagreement_pct": max(abs(one["ttft_mean_s"]) for one in off),
        "static_reuse_disagreement_points": max(abs(one["reuse_points"]) for one in off),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.peer_dynamo", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--peer-path", default="", metavar="DIR", help="where pip install --target put the wheels")
    options = parser.parse_args(argv)
    place = options.peer_path or next(map(str, REPOSITORY.glob(PEER_PLACES)), "")
    if not (Path(place, "dynamo").exists() if place else importlib.util.find_spec("dynamo")):
        raise SystemExit(NEEDS)
    load, runs = (QUICK, 1) if options.quick else (FULL, RUNS)
    sessions = sessions_of(
        load_trace(TRACE), WIDTH * 3 if options.quick else SESSIONS, most_tokens=MOST_TOKENS, max_pause_s=MAX_PAUSE_S
    )
    rows: list[Row] = []
    targets = [options.json] if options.json else [] if options.quick else [RESULTS]
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "sessions.jsonl")
        write_mooncake(sessions, BLOCK_TOKENS, trace)
        for case in cases(quick=options.quick):
            if not rows or rows[-1]["part"] != case.part:
                print(f"\n{case.part}")
            rows.append(run_case(case, sessions, trace, place, load, runs))
            show(rows[-1])
            line = document(rows, load, quick=options.quick)
            for target in targets:
                target.parent.mkdir(exist_ok=True)
                target.write_text(json.dumps(line) + "\n")
    print(json.dumps(line))
    return 0


def document(rows: Sequence[Row], load: Load, *, quick: bool) -> Row:
    """What is printed last, and written."""
    return {
        "bench": "peer_dynamo",
        "command": "python -m bench.peer_dynamo" + (" --quick" if quick else ""),
        "quick": quick,
        "simulated": True,
        **agreement(rows),
        "sessions_at_a_time": load.width,
        "scored_s": load.ends_s - load.warm_up_s,
        "rows": list(rows),
    }


if __name__ == "__main__":
    sys.exit(main())
