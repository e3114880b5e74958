"""What `ei explain` says of a decision."""

import io

import pytest
from rich.console import Console

from schemas.phase import CandidateVerdict, Decision, Workload
from services.cli.connection import CommandError
from services.cli.explain_decision import chosen, rendered

VERDICTS = [
    CandidateVerdict(split="6P3D", throughput_rps=5.1, ttft_p95_s=1.2, tpot_s=0.01, why="the split now"),
    CandidateVerdict(
        split="4P5D", gains=[0.1, 0.12], mean=0.11, stderr=0.01, threshold=0.031, passes=True, why="chosen"
    ),
]
FULL = Decision(
    id="planner-1-7",
    t=0.0,
    split_now="6P3D",
    split_new="4P5D",
    applied=True,
    why="gain +11.0% is above 3.1%",
    kind="window",
    mode="on",
    nodes=["n0", "n1"],
    pinned=["n8"],
    workload=Workload(t_uc=5268, t_c=150_000, attention_pairs=8e8, t_out=850, t_acc=2.5, media=1.25),
    q=30.0,
    agents=112.0,
    think_s=12.9,
    slices=["known"] * 9 + ["switching"],
    verdicts=VERDICTS,
)


def text_of(decision: Decision) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(rendered(decision))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_every_number_is_shown() -> None:
    shown = text_of(FULL)
    for part in (
        "6P3D -> 4P5D (ordered)",
        "gain +11.0% is above 3.1%",
        "n0, n1",
        "pinned: n8",
        "5,268 tokens computed",
        "1.25 media",
        "in decode on average: 30.0",
        "112.0, each pausing 12.9 s",
        "9 known, 1 switching",
        "+11.0%",
        "the split now",
        "1970-01-01 00:00:00 UTC",
    ):
        assert part in shown, part


def test_a_decision_of_an_older_planner_is_shown_too() -> None:
    shown = text_of(Decision(id="x", t=0.0, split_now="1P2D", applied=False, why="by hand"))
    assert "why: by hand" in shown
    assert "not ordered" in shown


def test_an_id_may_be_shortened_but_must_name_one() -> None:
    other = Decision(id="planner-2-1", t=1.0, split_now="1P2D", applied=False, why="")
    assert chosen([FULL, other], "last") is other
    assert chosen([FULL, other], "planner-1") is FULL
    with pytest.raises(CommandError, match="2 decisions begin with 'planner'; the newest are planner-1-7, planner-2-1"):
        chosen([FULL, other], "planner")
    with pytest.raises(CommandError, match="nothing yet"):
        chosen([], "last")
