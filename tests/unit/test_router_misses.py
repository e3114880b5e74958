"""Why tokens were computed: causes that add up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.directory import Absence, AbsenceReason, MatchReply
from services.router.core.misses import Cause, differs_at, miss_causes
from services.router.core.prefix import reusable_blocks

B = 4


@pytest.mark.parametrize(
    ("match", "prompt", "cached", "expected"),
    [
        (MatchReply(blocks=0), 40, 0, {Cause.NEW: 36, Cause.TAIL: 4}),
        (MatchReply(blocks=2, known_blocks=2, lineage="transient"), 40, 8, {Cause.DIVERGED: 28, Cause.TAIL: 4}),
        *[
            (MatchReply(blocks=3, known_blocks=9, absent=[Absence(first=3, last=9, reason=reason)]), 40, 12, found)
            for reason in AbsenceReason
            for found in ({Cause(reason.value): 24, Cause.TAIL: 4},)
        ],
        (
            MatchReply(
                blocks=3,
                known_blocks=9,
                absent=[
                    Absence(first=3, last=5, reason=AbsenceReason.NODE_LOST),
                    Absence(first=5, last=9, reason=AbsenceReason.UNREACHABLE),
                ],
            ),
            40,
            16,
            {Cause.NODE_LOST: 4, Cause.UNREACHABLE: 16, Cause.TAIL: 4},
        ),
        (MatchReply(blocks=3, known_blocks=9), 40, 12, {Cause.EVICTED: 24, Cause.TAIL: 4}),
        (MatchReply(blocks=9, known_blocks=9), 40, 8, {Cause.NOT_FETCHED: 28, Cause.TAIL: 4}),
        (MatchReply(blocks=0), 3, 0, {Cause.TAIL: 3}),
    ],
)
def test_case_97_each_cause_is_named(match: MatchReply, prompt: int, cached: int, expected: dict[Cause, int]) -> None:
    assert miss_causes(match, prompt, cached, reusable_blocks(prompt, B), B) == expected


@pytest.mark.parametrize(
    ("match", "token"),
    [
        (MatchReply(blocks=0, lineage="opens"), None),
        (MatchReply(blocks=9, lineage="extends", branch_blocks=8, context_blocks=9), None),
        (MatchReply(blocks=9, lineage="transient", branch_blocks=2, context_blocks=9), 8),
        (MatchReply(blocks=9, lineage="compact", branch_blocks=0, context_blocks=9), 0),
    ],
)
def test_the_token_where_a_prompt_leaves_its_branch_is_named(match: MatchReply, token: int | None) -> None:
    assert differs_at(match, 40, B) == token


pieces = st.lists(st.tuples(st.integers(0, 30), st.sampled_from(AbsenceReason)), max_size=4)


@given(
    st.integers(0, 30),
    st.integers(0, 30),
    st.integers(0, 30),
    st.integers(1, 130),
    st.integers(0, 30),
    st.booleans(),
    pieces,
)
def test_causes_add_up_to_the_uncached_tokens(
    blocks: int, known: int, branch: int, prompt: int, cached: int, departs: bool, absent: list
) -> None:
    """Whatever a directory answers."""
    match = MatchReply(
        blocks=blocks,
        known_blocks=known,
        branch_blocks=branch,
        lineage="compact" if departs else "extends",
        absent=[Absence(first=0, last=last, reason=reason) for last, reason in absent],
    )
    limit = reusable_blocks(prompt, B)
    cached_tokens = min(cached, limit) * B
    found = miss_causes(match, prompt, cached_tokens, limit, B)
    assert sum(found.values()) == prompt - cached_tokens
    assert all(tokens > 0 for tokens in found.values())
