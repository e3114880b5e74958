"""What follows from a request's end: the branch's new context or the release of its lease, and its record."""

from typing import TYPE_CHECKING

from services.router.core.effects import Effect, End, EndBranch, Outcome, Record, ReleaseMatch, StoreContext
from services.router.core.failure import Failure
from services.router.core.misses import Cause, differs_at, miss_causes
from services.router.core.prefix import reusable_blocks

if TYPE_CHECKING:
    from services.router.core.request import Request


def closing(request: "Request", outcome: Outcome, failure: Failure | None, now: float) -> list[Effect]:
    """Effects of the one end of `request`: claims follow an answer only; anything else gives back what was leased."""
    trimmed = request.finished is not None and request.finished.trimmed
    end = End(record_of(request, outcome, now), failure, trimmed, request.answer.tokens)
    branch, _ = request.branch
    if not outcome.answered or branch is None or request.places is None:
        return [ReleaseMatch(request.id), end]
    effects: list[Effect] = [stored_context(request, branch)]
    if request.spec.identity.end:
        effects.append(EndBranch(request.id, request.spec.identity.tenant, branch))
    return [*effects, end]


def stored_context(request: "Request", branch: str) -> StoreContext:
    """The context that has KV now: prompt and answer but for the last generated token, which was never fed."""
    assert request.places is not None
    context = request.spec.context.extended(request.answer.tokens[:-1])
    blocks = len(context.digests)
    base = min(request.match.branch_blocks, blocks)
    identity, match, places = request.spec.identity, request.match, request.places
    return StoreContext(
        request=request.id,
        tenant=identity.tenant,
        branch=branch,
        version=request.branch[1],
        parent=match.parent or identity.parent,
        kind=identity.kind,
        lineage=match.lineage,
        life=None if match.blind else match.life,
        inferred=match.inferred,
        tip=context.key(blocks - 1) if blocks else None,
        blocks=blocks,
        base_blocks=base,
        base=context.key(base - 1) if base else None,
        keys=context.keys(base),
        prompt_blocks=len(request.spec.context.digests),
        prefill_node=places.prefill.node,
        decode_node=places.decode_node,
        family=identity.family,
        compaction=identity.compaction,
    )


def record_of(request: "Request", outcome: Outcome, now: float) -> Record:
    """The request in figures. Where no leg told what was cached, nothing counts as cached."""
    places, times = request.places, request.times
    branch, version = request.branch
    return Record(
        request=request.id,
        branch=branch,
        version=version,
        outcome=outcome,
        arrived=times.arrived,
        ended=now,
        placed=times.placed,
        fetched=times.fetched,
        prefill_started=times.prefill_started,
        first_token=times.first_token,
        prompt_tokens=request.spec.context.tokens,
        cached_tokens=request.cached_tokens or 0,
        restored_tokens=request.restored_tokens,
        known_tokens=request.known_tokens,
        output_tokens=len(request.answer),
        prefill_node=places.prefill.node if places else None,
        decode_node=places.decode_node if places else None,
        attempts=request.attempt,
        ttft_predicted_s=times.predicted_ttft_s,
        blind=request.match.blind,
        lineage=request.match.lineage,
        candidates=places.candidates if places else (),
        misses=_misses(request) if outcome.answered else {},
        differs_at=differs_at(request.first_match, request.spec.context.tokens, request.context.scheme.block_size),
        tenant=request.spec.identity.tenant,
        media=request.spec.context.media_beyond(request.cached_tokens or 0),
    )


def _misses(request: "Request") -> dict[Cause, int]:
    context = request.spec.context
    size, tokens = context.scheme.block_size, context.tokens
    return miss_causes(request.first_match, tokens, request.cached_tokens or 0, reusable_blocks(tokens, size), size)
