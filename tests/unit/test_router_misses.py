"""Why tokens were computed: six causes that add up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.directory import MatchReply
from services.router.core.misses import Cause, miss_causes
from services.router.core.prefix import reusable_blocks

B = 4


@pytest.mark.parametrize(
    ("match", "prompt", "cached", "expected"),
    [
        (MatchReply(blocks=0), 40, 0, {Cause.NEW: 36, Cause.TAIL: 4}),
        (MatchReply(blocks=2, known_blocks=2, lineage="transient"), 40, 8, {Cause.DIVERGED: 28, Cause.TAIL: 4}),
        (
            MatchReply(blocks=3, known_blocks=9, branch_blocks=9, lineage="extends"),
            40,
            12,
            {Cause.EVICTED_REFERENCED: 24, Cause.TAIL: 4},
        ),
        (MatchReply(blocks=3, known_blocks=9), 40, 12, {Cause.EVICTED: 24, Cause.TAIL: 4}),
        (MatchReply(blocks=9, known_blocks=9), 40, 8, {Cause.NOT_FETCHED: 28, Cause.TAIL: 4}),
        (MatchReply(blocks=0), 3, 0, {Cause.TAIL: 3}),
    ],
)
def test_case_97_each_cause_is_named(match: MatchReply, prompt: int, cached: int, expected: dict[Cause, int]) -> None:
    assert miss_causes(match, prompt, cached, reusable_blocks(prompt, B), B) == expected


@given(
    st.integers(0, 30), st.integers(0, 30), st.integers(0, 30), st.integers(1, 130), st.integers(0, 30), st.booleans()
)
def test_causes_add_up_to_the_uncached_tokens(
    blocks: int, known: int, branch: int, prompt: int, cached: int, departs: bool
) -> None:
    match = MatchReply(
        blocks=blocks, known_blocks=known, branch_blocks=branch, lineage="compact" if departs else "extends"
    )
    limit = reusable_blocks(prompt, B)
    cached_tokens = min(cached, limit) * B
    found = miss_causes(match, prompt, cached_tokens, limit, B)
    assert sum(found.values()) == prompt - cached_tokens
    assert all(tokens > 0 for tokens in found.values())
