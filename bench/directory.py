"""The directory beside Dynamo's own index: `python -m bench.directory [--quick] [--json FILE] [--peer-path DIR]`.

The peer is `RadixTree` of the wheel ai-dynamo-runtime 1.6.1, the index of its Python API (KvIndexer stands in its type
stubs only). Both sides run in processes of their own, take turns, and get the same load: 64 nodes, about 1,000,000
blocks of 64 tokens, contexts of 100,000 tokens. What is included:

match: from a context's keys as each side takes them (ours: packed bytes; peer: a list of integers) to how many leading
blocks each node has; ours also joins all nodes to the longest prefix they supply together. `match_full` is our whole
answer to a request: that, its lineage, its branch's lease, and who else computes the same. Medians of the quietest of
many rounds on each side.
events: from message bytes (ours: MessagePack, in lots of 64 as the service takes them when they queue, `single` one by
one; peer: JSON, its only form) to blocks that are found; ours keeps reachability, counts, and what pools must be told.
Of each part of 128 messages the fastest of all builds counts.
bytes: growth of the resident set by the first build, over block copies; no branches yet on our side.
churn: 2,400 live blocks, 1,000,000 stored and removed; growth of the resident set after the first 100,000. Ours
remembers 16,384 keys of blocks that lie nowhere (a setting), which the first 100,000 fill.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.directory_load import CHURN_RUN_BLOCKS, SHAPES
from bench.directory_scale import at_scale
from bench.directory_served import served
from bench.directory_sides import quietest

NODES, BLOCKS = 64, 1_000_000
MATCHES = 250
REPOSITORY = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "directory.json"
PEER_PLACES = ".cache/dynamo/lib/python3*/site-packages"
"""Where the peer of bench.tokens lies, if it was installed."""
NEEDS_PEER = (
    "bench.directory needs Dynamo's index: pip install --no-deps ai-dynamo-runtime==1.6.1 (without its dependencies, "
    "whose pins are not ours), here, or with --target DIR and then --peer-path DIR"
)
Row = dict[str, Any]


class Side:
    """One index in its process."""

    def __init__(self, name: str, shape: str, blocks: int, peer_path: str) -> None:
        self.name = name
        path = os.pathsep.join(filter(None, [str(REPOSITORY), peer_path if name == "peer" else ""]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.directory_sides", name, shape, str(blocks), str(NODES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path, "DYN_LOG": "error"},
        )
        self._answer()

    def do(self, *order: Any) -> Row:
        """Give one order; its result."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _answer(self) -> Row:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"bench.directory: side {self.name} ended with {self._process.wait()}")
        answer: Row = json.loads(line)
        return answer


@contextlib.contextmanager
def sides(shape: str, blocks: int, peer_path: str) -> Iterator[tuple[Side, Side]]:
    """Ours and the peer."""
    ours, peer = (Side(name, shape, blocks, peer_path) for name in ("ours", "peer"))
    try:
        yield ours, peer
    finally:
        ours.end()
        peer.end()


def beside(shape: str, blocks: int, peer_path: str, *, rounds: int, runs: int) -> Row:
    """One shape of load on both sides, in turns."""
    with sides(shape, blocks, peer_path) as (ours, peer):
        built: dict[str, list[Row]] = {"single": [], "ours": [ours.do("build")], "peer": [peer.do("build")]}
        for _ in range(rounds):
            built["ours"].append(ours.do("build"))
            built["peer"].append(peer.do("build"))
            built["single"].append(ours.do("build", 1))
        took: dict[str, list[list[float]]] = {"ours": [], "peer": [], "full": []}
        for _ in range(2 * rounds):
            took["ours"].append(ours.do("match", MATCHES)["seconds"])
            took["peer"].append(peer.do("match", MATCHES)["seconds"])
            took["full"].append(ours.do("match", MATCHES, "match")["seconds"])
        churned = {side.name: side.do("churn", runs) for side in (ours, peer)} if runs else {}
    p50, p99 = ({name: quietest(rows, share) * 1e6 for name, rows in took.items()} for share in (0.5, 0.99))
    rate = {name: rows[0]["blocks"] / fastest(rows) for name, rows in built.items()}
    cpu = {name: min(row["cpu_s"] for row in rows) for name, rows in built.items()}
    size = {name: rows[0]["bytes_per_copy"] for name, rows in built.items() if name != "single"}
    return {
        "shape": shape,
        "copies": built["ours"][0]["blocks"],
        "match_ratio": p50["peer"] / p50["ours"],
        "match_full_ratio": p50["peer"] / p50["full"],
        "events_ratio": rate["ours"] / rate["peer"],
        "events_single_ratio": rate["single"] / rate["peer"],
        "events_cpu_ratio": cpu["peer"] / cpu["ours"],
        "events_single_cpu_ratio": cpu["peer"] / cpu["single"],
        "bytes_ratio": size["ours"] / size["peer"],
        "match_us_p50": p50["ours"],
        "match_us_p99": p99["ours"],
        "match_full_us_p50": p50["full"],
        "match_full_us_p99": p99["full"],
        "peer_match_us_p50": p50["peer"],
        "peer_match_us_p99": p99["peer"],
        "blocks_per_s": rate["ours"],
        "peer_blocks_per_s": rate["peer"],
        "bytes_per_copy": size["ours"],
        "peer_bytes_per_copy": size["peer"],
        **{f"{name}_churn": row for name, row in churned.items()},
    }


def fastest(builds: list[Row]) -> float:
    """Seconds of a build, each part of it taken from the build in which it was fastest."""
    return sum(min(parts) for parts in zip(*(build["seconds"] for build in builds), strict=True))


def figures(peer_path: str, *, quick: bool) -> Row:
    blocks, rounds = BLOCKS, 2 if quick else 15
    runs = (BLOCKS if not quick else 3 * BLOCKS // 10) // CHURN_RUN_BLOCKS
    rows = [
        beside(shape, blocks, peer_path, rounds=rounds, runs=runs if shape == "contexts" else 0) for shape in SHAPES
    ]
    first = rows[0]
    keys = ("match_ratio", "events_ratio", "bytes_ratio", "match_us_p50")
    return {
        "bench": "directory",
        "quick": quick,
        "nodes": NODES,
        **{key: first[key] for key in keys},
        "churn_growth": first["ours_churn"]["growth"],
        "rows": rows,
        "scale": at_scale(2_000_000 if quick else 20_000_000, NODES),
        "served": served(2.0 if quick else 10.0),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.directory", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, 2,000,000 copies at scale")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--peer-path", default="", metavar="DIR", help="where pip install --target put the peer")
    options = parser.parse_args(argv)
    place = options.peer_path or next(map(str, REPOSITORY.glob(PEER_PLACES)), "")
    if not (Path(place, "dynamo").exists() if place else importlib.util.find_spec("dynamo")):
        raise SystemExit(NEEDS_PEER)
    line = figures(place, quick=options.quick)
    for row in [*line["rows"], line["scale"], line["served"]]:
        print()
        for key, value in row.items():
            print(f"{key:26} {value:.3f}" if isinstance(value, float) else f"{key:26} {value}")
    for target in [options.json] if options.json else [] if options.quick else [RESULTS]:
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(line) + "\n")
    print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
