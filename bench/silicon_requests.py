"""Draws the requests of data/silicon/requests.json from the workload traces: `python -m bench.silicon_requests`."""

import argparse
import gzip
import json
import os
import random
from pathlib import Path

FILES = {"claude-code": "synth_cc", "putnam": "synth_putnam", "osworld": "synth_osworld"}
COUNT, SEED, BLOCK, LONGEST_PREFIX = 1500, 20260401, 64, 196_608
OUT = Path(__file__).parent.parent / "data" / "silicon" / "requests.json"


def drawn(path: Path, draw: random.Random) -> list[tuple[int, int, int]]:
    """(t_uc, t_c, t_out) of `COUNT` requests: t_c is the prefix that the branch's last prompt has computed."""
    found: list[tuple[int, int, int]] = []
    with gzip.open(path, "rt") as file:
        next(file)
        for line in file:
            row = json.loads(line)
            tokens = row["input_length"]
            cached = min(row["ctx"]["keep"] * BLOCK, (tokens - 1) // BLOCK * BLOCK)
            found.append((tokens - cached, cached, row["output_length"]))
    inside = [request for request in found if request[1] <= LONGEST_PREFIX]
    print(f"{path.name}: {len(found)} requests, {1 - len(inside) / len(found):.1%} beyond the tables")
    return draw.sample(inside, COUNT)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--traces", type=Path, default=os.environ.get("EI_TRACES", "data/traces"))
    folder: Path = parser.parse_args().traces
    draw = random.Random(SEED)
    requests = {name: drawn(folder / f"{file}.btrace.jsonl.gz", draw) for name, file in FILES.items()}
    OUT.write_text(json.dumps(requests, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
