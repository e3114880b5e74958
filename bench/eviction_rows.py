"""The rows of the eviction bench: one per trace, policy and capacity, kept so that none is replayed twice."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench.eviction_replay import Replay
from bench.eviction_sequence import Sequence

Row = dict[str, Any]


class Setting(NamedTuple):
    """How a sequence is recorded; `plays` is the half of the agents, "" for all."""

    trace: str
    agents: int
    tokens_per_block: int
    service_s: float
    longest_wait_s: float
    warm_s: float
    until_s: float
    plays: str


class Kept:
    """Finished rows in a file, a JSON line each; without a file only in memory."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._rows: dict[str, Row] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                self._rows[_name(Setting(**entry["setting"]), entry["row"]["policy"], entry["row"]["capacity"])] = (
                    entry["row"]
                )

    def rows(self) -> list[Row]:
        """All finished rows."""
        return [row for row in self._rows.values() if row["capacity"] is not None]

    def get(self, setting: Setting, policy: str, capacity: float | None, make: Callable[[], Row]) -> Row:
        """The row, made if it is not here yet."""
        name = _name(setting, policy, capacity)
        if name not in self._rows:
            row = self._rows[name] = {"trace": setting.trace, "capacity": capacity, "policy": policy} | make()
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps({"setting": setting._asdict(), "row": row}) + "\n")
        return self._rows[name]


def _name(setting: Setting, policy: str, capacity: float | None) -> str:
    return json.dumps([*setting, policy, capacity])


def replays(
    setting: Setting, recorded: Callable[[], Sequence], policies: list[str], capacities: list[float], kept: Kept
) -> Iterator[Row]:
    """One row per policy and capacity. `recorded` makes the sequence, at most once."""
    made: list[Sequence] = []

    def sequence() -> Sequence:
        if not made:
            made.append(recorded())
        return made[0]

    def demand() -> Row:
        """The most blocks that active branches claim, with room for everything."""
        return {"blocks": Replay(sequence(), "count-then-lru", sequence().blocks + 1024).run().most_referenced}

    most = kept.get(setting, "unlimited", None, demand)["blocks"]
    for capacity in capacities:
        for policy in policies:

            def replayed(policy: str = policy, blocks: int = max(1, int(capacity * most))) -> Row:
                return _replayed(sequence(), policy, blocks) | {"demand_blocks": most, "agents": setting.agents}

            yield kept.get(setting, policy, capacity, replayed)


def _replayed(sequence: Sequence, policy: str, blocks: int) -> Row:
    began = time.process_time()
    replay = Replay(sequence, policy, blocks)
    figures = replay.run()
    replay.pool.check()
    return {
        "hit": round(figures.hit / figures.prompt, 5),
        "ideal": round(figures.ideal / figures.prompt, 5),
        "lost": round(figures.lost, 6),
        "lost_tokens": (figures.ideal - figures.hit) * sequence.tokens_per_block,
        "ideal_tokens": figures.ideal * sequence.tokens_per_block,
        "slept_kept": round(figures.slept_hit / figures.slept_ideal, 4) if figures.slept_ideal else None,
        "left_kept": round(figures.left_kept / figures.left, 4) if figures.left else None,
        "refused": figures.refused,
        "values_told": figures.told_values,
        "cpu_s": round(time.process_time() - began, 1),
    }


def keys(rows: list[Row], trace: str) -> dict[str, float | None]:
    """What the rows of the Claude Code trace come to; None where a row or anything to divide by is missing."""
    lost = {(row["capacity"], row["policy"]): row["lost"] for row in rows if row["trace"] == trace}

    def over_lru(capacity: float) -> float | None:
        ours, lru = lost.get((capacity, "ours")), lost.get((capacity, "lru"))
        return None if ours is None or not lru else round(ours / lru, 4)

    counted, ours, best = (lost.get((0.7, policy)) for policy in ("count-then-lru", "ours", "oracle"))
    closed = None
    if counted is not None and ours is not None and best is not None and counted > best:
        closed = round((counted - ours) / (counted - best), 4)
    return {
        "lost_ratio_at_115": over_lru(1.15),
        "lost_ratio_at_1": over_lru(1.0),
        "lost_ratio_at_085": over_lru(0.85),
        "oracle_gap_closed_at_07": closed,
    }


def table(rows: list[Row], policies: list[str]) -> str:
    """Lost reuse in percent: a line per trace and capacity."""
    lines = [f"{'lost reuse %':30}" + "".join(f"{policy:>16}" for policy in policies)]
    for trace in dict.fromkeys(row["trace"] for row in rows):
        for capacity in sorted({row["capacity"] for row in rows if row["trace"] == trace}):
            found = {r["policy"]: r["lost"] for r in rows if (r["trace"], r["capacity"]) == (trace, capacity)}
            cells = "".join(f"{100 * found[p]:16.3f}" if p in found else f"{'':16}" for p in policies)
            lines.append(f"{trace:24}{100 * capacity:4.0f} %" + cells)
    return "\n".join(lines)
