"""What goes out when a request was placed: the news for its caller, and one message per leg."""

from typing import TYPE_CHECKING

import msgspec

from schemas.phase import Phase
from services.router.core.effects import Placed, SendLeg
from services.router.core.leg import Leg
from services.router.core.spec import Places

if TYPE_CHECKING:
    from services.router.core.request import Request


def placed_effect(request: "Request", places: Places) -> Placed:
    """Where the request went, as its response headers tell."""
    branch, version = request.branch
    best = places.prefill
    return Placed(request.id, best.node, places.decode_node, best.work.cached, branch, version, places.candidates)


def send_leg(request: "Request", places: Places, leg: Leg) -> SendLeg:
    """One leg of the current attempt: an attempt that goes on after some tokens asks for that many fewer."""
    branch, version = request.branch
    sampling, done = request.spec.sampling, request.base
    if done:
        sampling = msgspec.structs.replace(
            sampling,
            max_new_tokens=sampling.max_new_tokens - done,
            min_new_tokens=max(0, sampling.min_new_tokens - done),
        )
    return SendLeg(
        request=request.id,
        attempt=request.attempt,
        phase=leg.phase,
        node=leg.node,
        peer=leg.peer,
        room=leg.room,
        prompt=request.context.packed,
        sampling=sampling,
        cached_tokens=places.prefill.work.cached,
        fetch=places.prefill.fetch if leg.phase is Phase.PREFILL else (),
        resume=places.prefill.resume and leg.phase is Phase.PREFILL,
        tenant=request.spec.identity.tenant,
        branch=branch,
        version=version,
        traceparent=request.spec.traceparent,
        media=request.context.media,
    )
