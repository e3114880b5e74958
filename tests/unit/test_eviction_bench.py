"""The eviction bench on a few real agents: one sequence for all, and what the orders make of it."""

from pathlib import Path

import numpy as np
import pytest

from bench.eviction import CAPACITIES
from bench.eviction_policies import POLICIES
from bench.eviction_replay import Figures, Replay
from bench.eviction_rows import Kept, Setting, keys
from bench.eviction_sequence import NEVER, Sequence, record
from bench.eviction_trace import find

TRACES = Path(__file__).parents[2] / "data" / "traces"


def play(longest_wait_s: float, until_s: float = 600.0) -> Sequence:
    return record(
        find("cc_smoke", TRACES),
        trace="cc_smoke",
        agents=10,
        tokens_per_block=2048,
        service_s=10.0,
        longest_wait_s=longest_wait_s,
        warm_s=0.0,
        until_s=until_s,
    )


@pytest.fixture(scope="module")
def short() -> Sequence:
    return play(22.0)


@pytest.fixture(scope="module")
def recorded() -> Sequence:
    return play(float("inf"), until_s=1000.0)


def demand(sequence: Sequence) -> int:
    return Replay(sequence, "count-then-lru", sequence.blocks + 1024).run().most_referenced


def run(sequence: Sequence, policy: str, blocks: int) -> Figures:
    replay = Replay(sequence, policy, blocks)
    figures = replay.run()
    replay.pool.check()
    replay.directory.check()
    return figures


def test_the_sequence_is_the_same_each_time_and_knows_what_is_read_next(short: Sequence) -> None:
    again = play(22.0)
    assert [a[:7] for a in again.accesses] == [a[:7] for a in short.accesses]
    assert len(np.unique(short.block_digests[:, 0])) == short.blocks
    for number, access in enumerate(short.accesses[:200]):
        for block, use in zip(access.blocks.tolist(), access.next_use.tolist(), strict=True):
            reads = (n for n in range(number + 1, len(short.accesses)) if short.accesses[n].begins)
            assert use == next((n for n in reads if block in short.accesses[n].blocks), NEVER)
            break


def test_answers_come_after_the_service_time_and_requests_after_their_answers(short: Sequence) -> None:
    ended: dict[str, float] = {}
    for access in short.accesses:
        if access.begins:
            for needed in access.row.starts_after:
                wait_s = min(needed.delay_ms / 1000, 22.0)
                assert access.at_s >= ended[needed.request_id] + wait_s - 1e-9
        else:
            ended[access.request] = access.at_s


@pytest.mark.parametrize("policy", POLICIES)
def test_with_room_for_everything_no_order_loses_anything(short: Sequence, policy: str) -> None:
    figures = run(short, policy, short.blocks + 1024)
    assert figures.hit == figures.ideal > 0


def test_short_of_room_ours_is_between_the_oracle_and_lru(short: Sequence) -> None:
    blocks = int(0.85 * demand(short))
    best, ours, counted, lru = (run(short, p, blocks).lost for p in ("oracle", "ours", "count-then-lru", "lru"))
    assert 0 < best < ours < counted < lru


def test_a_sleeper_keeps_its_prefix_and_what_compactions_left_goes_first(recorded: Sequence) -> None:
    """Recorded waits of 300 to 420 s, at the same pressure: with the claims alone and by time the sleeper loses."""
    blocks = demand(recorded)
    ours, lru = run(recorded, "ours", blocks), run(recorded, "lru", blocks)
    assert ours.slept_hit >= 0.97 * ours.slept_ideal > 0
    assert lru.slept_hit < 0.97 * lru.slept_ideal
    assert ours.left_kept < lru.left_kept == lru.left


def test_keys_are_ratios_of_lost_reuse_and_none_without_rows() -> None:
    lost = {"ours": 0.03, "lru": 0.2, "count-then-lru": 0.13, "oracle": 0.01}
    rows = [{"trace": "t", "capacity": c, "policy": p, "lost": share} for p, share in lost.items() for c in CAPACITIES]
    assert keys(rows, "t") == {
        "lost_ratio_at_115": 0.15,
        "lost_ratio_at_1": 0.15,
        "lost_ratio_at_085": 0.15,
        "oracle_gap_closed_at_07": round(10 / 12, 4),
    }
    assert set(keys(rows, "other").values()) == {None}


def test_a_row_that_is_kept_is_not_made_again(tmp_path: Path) -> None:
    setting = Setting("t", 1, 64, 1.0, float("inf"), 0.0, 1.0, "")
    row = Kept(tmp_path / "kept").get(setting, "lru", 0.5, lambda: {"lost": 0.25})
    again = Kept(tmp_path / "kept")
    assert again.rows() == [row]
    assert again.get(setting, "lru", 0.5, dict) == row == {"trace": "t", "capacity": 0.5, "policy": "lru", "lost": 0.25}
    assert again.get(setting._replace(agents=2), "lru", 0.5, lambda: {"lost": 0.5})["lost"] == 0.5


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"synth_cc.btrace.jsonl.gz is missing.*EI_TRACES"):
        find("synth_cc", tmp_path)
