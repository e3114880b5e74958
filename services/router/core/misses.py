"""Why prompt tokens were computed although a cache exists: one cause for each of them."""

from enum import StrEnum

from schemas.directory import AbsenceReason, MatchReply

_DEPARTS = frozenset({"transient", "compact"})


class Cause(StrEnum):
    """NEW: nobody produced this KV before. DIVERGED: new as well, because the prompt left the branch's context at a
    token (`differs_at`). NEVER_STORED: produced, and never reported by any pool. EVICTED, EVICTED_REFERENCED: the last
    copy went while no active branch claimed it, or while one did. NODE_LOST: its node went. UNREACHABLE: copies lie
    beyond a gap. NOT_FETCHED: it lay there and did not come in time. TAIL: less than a block, or the last token, which
    is always computed."""

    NEW = "new"
    DIVERGED = "diverged"
    NEVER_STORED = "never_stored"
    EVICTED_REFERENCED = "evicted_referenced"
    EVICTED = "evicted"
    NODE_LOST = "node_lost"
    UNREACHABLE = "unreachable"
    NOT_FETCHED = "not_fetched"
    TAIL = "tail"


_CAUSES = {
    AbsenceReason.NEVER_STORED: Cause.NEVER_STORED,
    AbsenceReason.EVICTED: Cause.EVICTED,
    AbsenceReason.EVICTED_REFERENCED: Cause.EVICTED_REFERENCED,
    AbsenceReason.NODE_LOST: Cause.NODE_LOST,
    AbsenceReason.UNREACHABLE: Cause.UNREACHABLE,
}


def miss_causes(
    match: MatchReply, prompt_tokens: int, cached_tokens: int, reusable_blocks: int, block_size: int
) -> dict[Cause, int]:
    """Tokens by cause; they add up to the uncached tokens, and causes without any are left out.

    [0, cached) came from the cache, [cached, resident) lay in the cluster, [resident, known) was remembered and says
    why it is not there, [known, reusable) is new, [reusable, prompt) cannot be reused.
    """
    reusable = max(reusable_blocks * block_size, cached_tokens)
    resident = min(reusable, match.blocks * block_size)
    known = min(reusable, max(match.known_blocks * block_size, resident))
    found = {
        Cause.NOT_FETCHED: max(0, resident - cached_tokens),
        Cause.DIVERGED if match.lineage in _DEPARTS else Cause.NEW: reusable - max(known, cached_tokens),
        Cause.TAIL: prompt_tokens - reusable,
    }
    begin = max(resident, cached_tokens)
    for piece in match.absent:
        end = max(begin, min(known, piece.last * block_size))
        cause = _CAUSES[piece.reason]
        found[cause] = found.get(cause, 0) + end - begin
        begin = end
    found[Cause.EVICTED] = found.get(Cause.EVICTED, 0) + max(0, known - begin)
    return {cause: tokens for cause, tokens in found.items() if tokens}


def differs_at(match: MatchReply, prompt_tokens: int, block_size: int) -> int | None:
    """The first token of the block in which a prompt leaves the context of its branch; None when it extends it."""
    if match.lineage not in _DEPARTS or match.branch_blocks >= match.context_blocks:
        return None
    return min(prompt_tokens, match.branch_blocks * block_size)
