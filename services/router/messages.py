"""What the router publishes about a request that ended, in the words of the wire."""

from schemas.branch import BranchEvent, BranchEventType
from schemas.telemetry import RequestTelemetry, RouteCandidate
from services.router.core.effects import EndBranch, Record, StoreContext
from services.router.core.placement import Candidate
from services.router.core.sweep import best_of

SOURCE = "router"
_CANDIDATES_TOLD = 8


def context_event(stored: StoreContext, wall: float, finish: str) -> BranchEvent:
    """The branch's new context. Its id follows from the request, so that storing it twice stores it once."""
    return BranchEvent(
        id=f"{stored.request}-context",
        t=wall,
        type=BranchEventType.CONTEXT,
        branch=stored.branch,
        tenant=stored.tenant,
        parent=stored.parent,
        kind=stored.kind,
        version=stored.version,
        source=SOURCE,
        request=stored.request,
        tip=stored.tip,
        blocks=stored.blocks,
        base_blocks=stored.base_blocks,
        base=stored.base,
        keys=stored.keys,
        prompt_blocks=stored.prompt_blocks,
        lineage=stored.lineage,
        life=stored.life,
        prefill_node=stored.prefill_node,
        decode_node=stored.decode_node,
        inferred=stored.inferred,
        family=stored.family,
        compaction=stored.compaction,
        finish=finish,
    )


def end_event(ended: EndBranch, wall: float) -> BranchEvent:
    """The branch ended with its last answer."""
    return BranchEvent(
        id=f"{ended.request}-end",
        t=wall,
        type=BranchEventType.END,
        branch=ended.branch,
        tenant=ended.tenant,
        source=SOURCE,
        request=ended.request,
    )


def request_telemetry(record: Record, wall_minus_monotonic: float, wall: float) -> RequestTelemetry:
    """One finished request; its monotonic times shifted to Unix seconds."""

    def at(moment: float | None) -> float | None:
        return None if moment is None else moment + wall_minus_monotonic

    best = best_of(record.candidates, _CANDIDATES_TOLD)
    return RequestTelemetry(
        id=f"{record.request}-ended",
        t=wall,
        request=record.request,
        branch=record.branch,
        version=record.version,
        outcome=record.outcome.value,
        t_arrive=record.arrived + wall_minus_monotonic,
        t_placed=at(record.placed),
        t_fetched=at(record.fetched),
        t_prefill_start=at(record.prefill_started),
        t_first_token=at(record.first_token),
        t_end=record.ended + wall_minus_monotonic,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        restored_tokens=record.restored_tokens,
        uncached_tokens=record.uncached_tokens if record.outcome.answered else 0,
        ideal_tokens=record.known_tokens,
        output_tokens=record.output_tokens,
        prefill_node=record.prefill_node,
        decode_node=record.decode_node,
        attempts=record.attempts,
        ttft_predicted_s=record.ttft_predicted_s,
        ttft_s=record.ttft_s,
        blind=record.blind,
        lineage=record.lineage,
        misses={cause.value: tokens for cause, tokens in record.misses.items()},
        differs_at=record.differs_at,
        candidates=[_candidate(found) for found in best],
        media=record.media if record.outcome.answered else 0,
    )


def _candidate(found: Candidate) -> RouteCandidate:
    return RouteCandidate(
        node=found.node,
        wait_s=found.remaining_s + found.queue_s,
        service_s=found.service_s + found.rest_s,
        fetch_s=found.fetch_s,
        duplicate_s=found.duplicate_s,
        ttft_s=found.ttft_s,
        cached_tokens=found.work.cached,
        fetched_from=sorted({source.node for source in found.fetch}),
    )
