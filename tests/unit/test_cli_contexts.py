"""Prompts of a replay: what is kept, what the engine answered, what is new; and the ideal hit they give."""

from array import array

import pytest

from services.btrace import ContextRecipe, Operation, Row
from services.cli.replay.contexts import PlayContexts, Scale, TokenSource
from services.cli.replay.ideal import IdealCache

ALPHABET = list(range(100, 400))


def row(
    name: str,
    length: int,
    keep: int,
    add: list[tuple[int, int]],
    op: Operation = Operation.APPEND,
    *,
    session: str = "a/0",
    output: int = 8,
    base: str | None = None,
    prefix: tuple[str, int] | None = None,
) -> Row:
    return Row(
        request_id=name,
        play_id="a",
        session_id=session,
        input_length=length,
        output_length=output,
        dependencies=[],
        ctx=ContextRecipe(keep, add, base),
        op=op,
        prefix_class=prefix[0] if prefix else None,
        prefix_blocks=prefix[1] if prefix else 0,
    )


def contexts(rows: list[Row], instance: str = "run.a", source: int = 4, target: int = 4) -> PlayContexts:
    return PlayContexts(rows, instance, Scale(source, target), TokenSource(ALPHABET, "seed"))


def test_the_next_prompt_holds_the_answer_then_the_recorded_number_of_new_tokens() -> None:
    first = row("r0", 10, 0, [(1, 2)], Operation.ROOT)
    second = row("r1", 25, 2, [(3, 4)])
    made = contexts([first, second])
    prompt = made.prompt(first)
    answer = array("I", range(8))
    made.answered(first, answer)
    following = made.prompt(second)
    assert following[:18] == prompt + answer
    assert len(following) == 25


def test_a_rewritten_tail_of_up_to_two_blocks_is_still_the_same_context() -> None:
    first = row("r0", 20, 0, [(1, 5)], Operation.ROOT)
    made = contexts([first, row("r1", 40, 3, [(9, 7)]), row("r2", 60, 2, [(30, 13)])])
    prompt = made.prompt(first)
    made.answered(first, array("I", range(8)))
    assert made.prompt(row("r1", 40, 3, [(9, 7)]))[:28] == prompt + array("I", range(8))


def test_a_dropped_answer_cuts_the_context_to_the_recorded_length() -> None:
    first = row("r0", 12, 0, [(1, 3)], Operation.ROOT, output=100)
    second = row("r1", 20, 3, [(5, 2)])
    made = contexts([first, second])
    prompt = made.prompt(first)
    made.answered(first, array("I", range(100)))
    assert made.prompt(second) == prompt + array("I", range(8))


def test_a_compaction_keeps_its_blocks_and_no_answer() -> None:
    first = row("r0", 40, 0, [(1, 10)], Operation.ROOT)
    second = row("r1", 16, 3, [(50, 1)], Operation.COMPACT)
    made = contexts([first, second])
    prompt = made.prompt(first)
    made.answered(first, array("I", range(8)))
    compacted = made.prompt(second)
    assert compacted[:12] == prompt[:12]
    assert len(compacted) == 16
    assert compacted[12:] != prompt[12:16]


def test_a_block_id_that_recurs_brings_its_tokens_back() -> None:
    rows = [
        row("r0", 16, 0, [(1, 4)], Operation.ROOT),
        row("r1", 16, 1, [(20, 3)], Operation.COMPACT),
        row("r2", 16, 1, [(2, 3)], Operation.COMPACT),
    ]
    made = contexts(rows)
    prompts = []
    for one in rows:
        prompts.append(made.prompt(one))
        made.answered(one, array("I", range(8)))
    assert prompts[2] == prompts[0]
    assert prompts[1][4:] != prompts[0][4:]


def test_siblings_share_the_prefix_of_a_base_that_was_not_played_yet() -> None:
    first = row("s0", 16, 0, [(1, 4)], Operation.SUBAGENT, session="a/s0")
    second = row("s1", 16, 3, [(30, 1)], Operation.SUBAGENT, session="a/s1", base="s0")
    made = contexts([first, second])
    early = made.prompt(second)
    assert made.prompt(first)[:12] == early[:12]


def test_agents_of_a_class_share_their_leading_blocks_and_nothing_else() -> None:
    one = row("r0", 16, 0, [(1, 4)], Operation.ROOT, prefix=("class", 2))
    other = row("r0", 16, 0, [(7, 4)], Operation.ROOT, prefix=("class", 2))
    first = contexts([one], "run.a").prompt(one)
    second = contexts([other], "run.b").prompt(other)
    assert first[:8] == second[:8]
    assert first[8:] != second[8:]
    assert contexts([one], "run.a").prompt(one) == first


@pytest.mark.parametrize(("target", "length"), [(4, 18), (1, 4), (16, 72)])
def test_lengths_follow_the_tokens_per_block(target: int, length: int) -> None:
    first = row("r0", 18, 0, [(1, 4)], Operation.ROOT)
    assert len(contexts([first], target=target).prompt(first)) == length


def test_the_ideal_hit_counts_full_blocks_that_earlier_requests_produced() -> None:
    cache = IdealCache(4)
    prompt = array("I", range(10))
    first = cache.open(prompt)
    assert first.ideal_tokens == 0
    assert cache.open(prompt).ideal_tokens == 0, "nothing is computed before the first token"
    first.generated(array("I", [50]))
    assert cache.open(prompt).ideal_tokens == 8
    first.generated(array("I", [51, 52]))
    longer = prompt + array("I", [50, 51, 52, 53])
    assert cache.open(longer).ideal_tokens == 12, "the newest token was never fed, the two before it were"
    first.generated(array("I", [53, 54, 55, 56, 57]))
    assert cache.open(longer + array("I", [54, 55, 56, 57, 58])).ideal_tokens == 16


def test_the_last_prompt_token_is_always_computed() -> None:
    cache = IdealCache(4)
    cache.open(array("I", range(8))).generated(array("I", [1]))
    assert cache.open(array("I", range(8))).ideal_tokens == 4
    assert cache.open(array("I", range(9))).ideal_tokens == 8
