"""The pure parts of bench.peer_dynamo: one trace for two simulators, figures, stand-ins, our core as a policy."""

import importlib
import json
import sys
from array import array
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import peer_dynamo_standins as standins
from bench.peer_dynamo import agreement, job_of
from bench.peer_dynamo_cases import STATIC, SWAPPED, cases
from bench.peer_dynamo_figures import Served, differences, figures, middle
from bench.peer_dynamo_ours import Load, dynamo, simulate
from bench.peer_dynamo_policy import CorePolicy, mean_request
from bench.peer_dynamo_replay import engine_of
from bench.peer_dynamo_trace import Loop, Session, keys_of, runs_of, sessions_of, write_mooncake
from schemas.phase import Split
from services.engine.core.timing import DecodeTerms, PrefillTerms
from services.simulator.call import Call
from services.simulator.clock import Agenda
from services.simulator.hardware import mocker_times
from services.simulator.trace import Play, Trace, Turn

BLOCK = 64
LOAD = Load(2, 0.0, 600.0)


def turn(prompt: int, *, base: int | None, add: list[tuple[int, int]], keep: int = 0, pause: float) -> Turn:
    return Turn(
        branch="b",
        parent=None,
        op="append" if base is not None else "root",
        version=0,
        prompt_tokens=prompt,
        output_tokens=10,
        not_before_s=0.0,
        after=() if base is None else ((base, pause),),
        base=base,
        keep=keep,
        goes_on=base is not None,
        add=add,
        last=False,
        prefix_class="code" if base is None else None,
        prefix_blocks=2 if base is None else 0,
    )


def small_trace() -> Trace:
    """Three turns of one branch, of 4, 6 and 9 blocks and a few tokens."""
    turns = [
        turn(4 * BLOCK + 1, base=None, add=[(0, 4)], pause=0.0),
        turn(6 * BLOCK, base=0, keep=4, add=[(4, 2)], pause=5.0),
        turn(9 * BLOCK + 7, base=1, keep=6, add=[(6, 3)], pause=100.0),
    ]
    return Trace(BLOCK, [Play("p", turns, 9, [[(1, 5.0)], [(2, 100.0)], []])])


def sessions(count: int = 2, most_tokens: int = 10_000) -> list[Session]:
    return sessions_of(small_trace(), count, most_tokens=most_tokens, max_pause_s=20.0)


@given(st.lists(st.tuples(st.integers(1, 1 << 40), st.integers(1, 5)), max_size=20))
def test_runs_are_the_keys_again(pieces: list[tuple[int, int]]) -> None:
    keys = array("Q", [first + i for first, count in pieces for i in range(count)])
    runs = runs_of(keys)
    assert keys_of(runs) == keys
    assert all(a[0] + a[1] != b[0] for a, b in pairwise(runs))


def test_a_trace_goes_round_and_shares_only_the_prefix_of_the_class() -> None:
    first, second = sessions()
    assert [ask.pause_s for ask in first.asks] == [0.0, 5.0, 20.0]
    assert first.name != second.name
    a, b = (keys_of(session.asks[-1].prompt) for session in (first, second))
    assert len(a) == len(b) == 9
    assert list(a[:2]) == list(b[:2])
    assert not set(a[2:]) & set(b[2:])


def test_a_session_ends_before_its_first_prompt_above_the_limit() -> None:
    assert [len(session.asks) for session in sessions(1, most_tokens=7 * BLOCK)] == [2]


def test_mooncake_rows_name_every_block_and_begin_sessions_in_order(tmp_path: Path) -> None:
    write_mooncake(sessions(), BLOCK, tmp_path / "t.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert [row.get("timestamp") for row in rows] == [0, None, None, 1, None, None]
    assert [row.get("delay") for row in rows[:3]] == [None, 5000.0, 20_000.0]
    assert all(len(row["hash_ids"]) == -(-row["input_length"] // BLOCK) for row in rows)
    assert rows[1]["hash_ids"][:4] == rows[0]["hash_ids"][:4]
    assert rows[1]["hash_ids"][4] != rows[0]["hash_ids"][4]


def test_a_loop_keeps_its_width_and_its_pauses() -> None:
    agenda = Agenda()
    open_calls: list[Call] = []
    arrived: list[tuple[float, str, int]] = []
    most = 0

    def arrive(call: Call, now: float) -> None:
        nonlocal most
        open_calls.append(call)
        most = max(most, len(open_calls))
        arrived.append((now, call.branch, call.turn))
        agenda.at(now + 1.0, lambda at: answer(call, at))

    def answer(call: Call, now: float) -> None:
        open_calls.remove(call)
        loop.answered(call, now)

    three = sessions(3)
    loop = Loop(three, 2, agenda, arrive)
    agenda.run(1000.0)
    assert most == 2
    assert [at for at, branch, _ in arrived if branch == three[0].name] == [0.0, 6.0, 27.0]
    assert [at for at, branch, _ in arrived if branch == three[2].name] == [28.0, 34.0, 55.0]


def test_figures_score_what_was_answered_in_the_window() -> None:
    served = [Served(0.0, 1.0, 9.0, 100, 0), Served(5.0, 7.0, 15.0, 100, 50), Served(6.0, 6.5, 20.0, 100, 100)]
    found = figures(served, 10.0, 20.0)
    assert (found["requests"], found["rps"], found["ttft_mean_s"]) == (1.0, 0.1, 2.0)
    assert (found["e2e_mean_s"], found["reuse_pct"]) == (10.0, 50.0)
    with pytest.raises(ValueError, match="between 30 and 40 s"):
        figures(served, 30.0, 40.0)


def test_medians_say_how_far_runs_lie_apart() -> None:
    runs = [
        {"rps": rps, "ttft_mean_s": 1.0, "e2e_mean_s": 2.0, "reuse_pct": 0.0, "split": "x"} for rps in (2.0, 4.0, 5.0)
    ]
    found = middle(runs)
    assert found["rps"] == 4.0
    assert found["spread_pct"] == {"rps": 75.0, "ttft_mean_s": 0.0, "e2e_mean_s": 0.0, "reuse_pct": 0.0}
    assert differences(found, found | {"rps": 5.0, "reuse_pct": 3.0})["rps"] == pytest.approx(-20.0)
    assert differences(found, found | {"reuse_pct": 3.0})["reuse_points"] == -3.0


def test_agreement_is_that_of_static_splits_alone() -> None:
    small = {"rps": -1.0, "e2e_mean_s": 2.0, "ttft_mean_s": 9.0, "reuse_points": -3.0}
    rows = [{"part": STATIC, "difference": small}, {"part": "each adapts", "difference": {**small, "rps": 50.0}}]
    assert agreement(rows) == {
        "static_disagreement_pct": 2.0,
        "static_ttft_disagreement_pct": 9.0,
        "static_reuse_disagreement_points": 3.0,
    }


def test_mocker_times_are_the_polynomial() -> None:
    times = mocker_times(1000)
    assert times.prefill_s(PrefillTerms(1, 8192, 0.0)) == pytest.approx(0.169137, abs=1e-5)
    assert times.decode_s(DecodeTerms(1, 500)) == pytest.approx(0.02631)
    assert times.decode_s(DecodeTerms(1, 5000)) == times.decode_s(DecodeTerms(1, 1000)) == pytest.approx(0.03401)


def test_a_job_has_what_the_profile_says() -> None:
    case = next(case for case in cases(quick=False) if case.host and case.part == STATIC)
    job = job_of(case, Path("t"), LOAD)
    prefill, decode = engine_of(job, "prefill")["engine"], engine_of(job, "decode")["engine"]
    assert prefill["num_gpu_blocks"] == decode["num_gpu_blocks"] == 16_384
    assert prefill["native_host_offload"]["num_host_blocks"] == 4 * 16_384
    assert "native_host_offload" not in decode
    assert prefill["enable_prefix_caching"]
    assert not decode["enable_prefix_caching"]


def test_both_sides_of_a_planner_start_from_the_same_split() -> None:
    starts = {case.split for case in cases(quick=False) if case.part == SWAPPED or case.startup_s}
    assert starts == {"6P3D"}


def test_our_side_answers_every_session() -> None:
    found = simulate(dynamo(host=True, planner=False), "1P1D", sessions(4), LOAD, 1)
    assert found["requests"] == 12
    assert found["reuse_pct"] > 50
    assert found["ttft_mean_s"] < found["e2e_mean_s"]


@pytest.fixture
def only_here() -> Iterator[None]:
    """Finders and modules of a test go with it."""
    finders, modules = list(sys.meta_path), set(sys.modules)
    yield
    sys.meta_path[:] = finders
    for name in set(sys.modules) - modules:
        del sys.modules[name]
    standins.used.clear()


@pytest.mark.usefixtures("only_here")
def test_a_stand_in_can_be_named_and_not_used() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("aisimulate_core.sdk")
    standins.stand_in()
    module = importlib.import_module("aisimulate_core.sdk")
    assert isinstance(module.Model.Inner, type)
    with pytest.raises(standins.StandInUsed, match="Model"):
        module.Model()
    assert standins.used == ["aisimulate_core.sdk.Model"]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("not_on_the_list")


def snapshot(worker: int, **changed: Any) -> dict[str, Any]:
    fields = (
        *("wall_time", "num_prefill_requests", "sum_prefill_tokens", "sum_prefill_kv_tokens"),
        *("num_decode_requests", "sum_decode_kv_tokens", "num_queued_prefill"),
    )
    return {"worker_id": worker, **dict.fromkeys(fields, 0), **changed}


def tick(now: float, prefill: int, decode: int, *, draining: bool = False) -> dict[str, Any]:
    """A second in which decode is the bottleneck: three workers with 15 requests each, prefill nearly idle."""
    running = 45 // decode + int(now) % 9 - 4
    uncached = 500 + int(now) % 7 * 400
    return {
        "now_ms": 1e3 * now,
        "prefill_fpm_snapshots": [
            snapshot(
                worker,
                wall_time=0.0165 + 1.5e-5 * uncached,
                num_prefill_requests=1,
                sum_prefill_tokens=uncached,
                sum_prefill_kv_tokens=60_000,
            )
            for worker in range(prefill)
        ],
        "decode_fpm_snapshots": [
            snapshot(
                worker,
                wall_time=0.006 + 0.002 * running,
                num_decode_requests=running,
                sum_decode_kv_tokens=60_000 * running,
            )
            for worker in range(decode)
        ],
        **{f"active_{pool}_ids": list(range(count)) for pool, count in (("prefill", prefill), ("decode", decode))},
        **{f"{state}_{pool}_ids": [] for state in ("starting", "draining") for pool in ("prefill", "decode")},
        **({"draining_prefill_ids": [99]} if draining else {}),
        "traffic": {
            "shape_count": 3,
            "avg_isl": 60_000.0,
            "avg_osl": 400.0,
            "avg_kv_hit_rate": 0.97,
            "avg_ttft_ms": 100.0,
            "avg_itl_ms": 36.0,
        },
    }


def test_pauses_are_what_little_s_law_says_of_the_sessions() -> None:
    traffic = tick(1.0, 6, 3)["traffic"]
    requests = [mean_request(traffic, number, 80, float(number // 4)) for number in range(160)]
    first, second = (one for one in requests if one.branch == "s7")
    took_s = 0.1 + 0.036 * 399
    assert second.t_arrive - first.t_end == pytest.approx(80 / 4.0 - took_s)


def test_our_core_moves_workers_to_the_bottleneck_and_keeps_their_number() -> None:
    policy = CorePolicy(Split(6, 3), 80, 1_000_000, 8192, 64)
    assert policy.initial_tick_ms() == 1000.0
    now, wanted = 0.0, (6, 3)
    for _ in range(700):
        now += 1.0
        before = wanted
        said = policy.on_tick(tick(now, *wanted))
        wanted = said["target_prefill"], said["target_decode"]
        policy.core.check()
        assert sum(wanted) == 9
        assert min(wanted) >= 1
        assert said["next_tick_ms"] == 1e3 * (now + 1.0)
        if wanted != before:
            break
    assert 590 <= now <= 610, "at the end of the first window"
    assert wanted[1] > 3
    assert policy.changes == [(now, "prefill", 6, wanted[0]), (now, "decode", 3, wanted[1])]
    assert policy.core.switches.open
    policy.on_tick(tick(now + 1.0, *wanted, draining=True))
    assert policy.core.switches.open
    policy.on_tick(tick(now + 2.0, *wanted))
    policy.on_tick(tick(now + 3.0, *wanted))
    assert not policy.core.switches.open
