"""Why prompt tokens were computed although a cache exists: one cause for each of them."""

from enum import StrEnum

from schemas.directory import MatchReply

_DEPARTS = frozenset({"transient", "compact"})


class Cause(StrEnum):
    """NEW: nobody produced this KV before. DIVERGED: the branch's context was left. EVICTED_REFERENCED: gone although
    the branch still needs it. EVICTED: gone after nobody needed it. NOT_FETCHED: it lay somewhere and did not come in
    time. TAIL: less than a block, or the last token, which is always computed."""

    NEW = "new"
    DIVERGED = "diverged"
    EVICTED_REFERENCED = "evicted_referenced"
    EVICTED = "evicted"
    NOT_FETCHED = "not_fetched"
    TAIL = "tail"


def miss_causes(
    match: MatchReply, prompt_tokens: int, cached_tokens: int, reusable_blocks: int, block_size: int
) -> dict[Cause, int]:
    """Tokens by cause; they add up to the uncached tokens, and causes without any are left out.

    [0, cached) came from the cache, [cached, resident) lay in the cluster, [resident, known) was remembered,
    [known, reusable) is new, [reusable, prompt) cannot be reused.
    """
    reusable = max(reusable_blocks * block_size, cached_tokens)
    resident = min(reusable, match.blocks * block_size)
    known = min(reusable, max(match.known_blocks * block_size, resident))
    needed = min(known, match.branch_blocks * block_size)
    at = max(resident, cached_tokens)
    found = {
        Cause.NOT_FETCHED: max(0, resident - cached_tokens),
        Cause.EVICTED_REFERENCED: max(0, needed - at),
        Cause.EVICTED: max(0, known - max(at, needed)),
        Cause.DIVERGED if match.lineage in _DEPARTS else Cause.NEW: reusable - max(known, cached_tokens),
        Cause.TAIL: prompt_tokens - reusable,
    }
    return {cause: tokens for cause, tokens in found.items() if tokens}
