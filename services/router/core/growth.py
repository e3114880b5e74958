"""The most frequent news by far: an answer under way grows. What it takes is kept apart from the rest of a request."""

from schemas.phase import Phase
from schemas.serve import LegUpdate, RequestState
from services.router.core.leg import DECODE_SILENCE_S
from services.router.core.request import Request


def only_grows(request: Request, node: str, update: LegUpdate) -> bool:
    """Whether the update has the next tokens of an answer that has begun, and nothing can follow but those tokens."""
    decode = request.legs.get(Phase.DECODE)
    return (
        update.state is None
        and update.finish is None
        and update.phase is Phase.DECODE
        and decode is not None
        and decode.finish is None
        and decode.node == node
        and update.attempt == request.attempt
        and request.finished is None
        and request.stuck_since is None
        and request.times.first_token is not None
        and request.base + update.seq <= len(request.answer)
    )


def grow(request: Request, update: LegUpdate, now: float) -> list[int]:
    """Take an update that `only_grows`; the tokens that are new."""
    request.legs[Phase.DECODE].heard = now
    return request.answer.take(request.base + update.seq, update.tokens)


def calm_until(request: Request) -> float:
    """Before when `Request.tick` has nothing to do if the answer merely grows; -inf for one that is not under way."""
    prefill, decode = request.legs.get(Phase.PREFILL), request.legs.get(Phase.DECODE)
    under_way = (
        prefill is not None
        and not prefill.open
        and decode is not None
        and decode.open
        and decode.state is RequestState.DECODING
        and request.finished is None
        and request.wake_at is None
        and not request.answer.gap
    )
    if not under_way or decode is None:
        return float("-inf")
    return min(request.times.arrived + request.spec.timeout_s, decode.heard + DECODE_SILENCE_S)
