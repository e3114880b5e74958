"""Legs on their way to engines: serve, cancel, ask again. Answers go back into the core."""

from schemas.block_key import tenant_salt
from schemas.codec import RejectedMessage, encode
from schemas.phase import Phase
from schemas.serve import (
    CANCEL_REPLY,
    REPLY_BATCH,
    SERVE_REPLY,
    CancelRequest,
    ReplyBatch,
    ResendRequest,
    ServeReply,
    ServeRequest,
)
from schemas.subjects import Subjects
from services.bus import Bus, BusError, BusTimeout, BusUnavailable, NoResponders, PayloadTooLarge
from services.router.core.effects import AskAgain, CancelLeg, SendLeg

_FRAME_BYTES = 4096
"""What a leg's message takes besides prompt and fetch plan, with room to spare."""
_SOURCE_BYTES = 96
_SERVE_TRIES, _CANCEL_TRIES = 3, 3


class LegSender:
    """Speaks to engines for one router. Waits at most `timeout_s` for each answer.

    A leg is sent again when its answer stays away: a busy node is not a dead one, and the same leg twice is one leg.
    """

    def __init__(self, bus: Bus, subjects: Subjects, router: str, timeout_s: float) -> None:
        self._bus, self._subjects, self._router, self._timeout_s = bus, subjects, router, timeout_s

    async def serve(self, leg: SendLeg, deadline_s: float) -> ServeReply | None:
        """The node's answer, None without one in time. BusUnavailable: the broker is away."""
        data, subject = encode(self._request(leg, deadline_s)), self._subjects.serve(leg.node)
        for _ in range(_SERVE_TRIES):
            try:
                return SERVE_REPLY.decode(await self._bus.request(subject, data, self._timeout_s))
            except BusTimeout:
                continue
            except BusUnavailable:
                raise
            except PayloadTooLarge as error:
                return ServeReply(accepted=False, epoch=0, reason="context", text=str(error))
            except NoResponders as error:
                return ServeReply(accepted=False, epoch=0, reason="gone", text=str(error))
            except (BusError, RejectedMessage):
                return None
        return None

    async def cancel(self, leg: CancelLeg) -> None:
        """Tell the node until it answers; a node that is gone has nothing to cancel."""
        data = encode(CancelRequest(id=leg.request, attempt=leg.attempt, phase=leg.phase))
        for _ in range(_CANCEL_TRIES):
            try:
                CANCEL_REPLY.decode(await self._bus.request(self._subjects.cancel(leg.node), data, self._timeout_s))
            except NoResponders:
                return
            except (BusError, RejectedMessage):
                continue
            return

    async def ask_again(self, leg: AskAgain) -> ReplyBatch | None:
        """What the node knows of the leg: an empty batch if nothing; None without an answer."""
        request = ResendRequest(id=leg.request, attempt=leg.attempt, phase=leg.phase, seq=max(0, leg.seq))
        try:
            data = await self._bus.request(self._subjects.resend(leg.node), encode(request), self._timeout_s)
            return REPLY_BATCH.decode(data)
        except (BusError, RejectedMessage):
            return None

    def _request(self, leg: SendLeg, deadline_s: float) -> ServeRequest:
        size = len(leg.prompt) + _FRAME_BYTES + _SOURCE_BYTES * len(leg.fetch)
        return ServeRequest(
            id=leg.request,
            attempt=leg.attempt,
            phase=leg.phase,
            router=self._router,
            peer=leg.peer,
            room=leg.room,
            prompt_tokens=len(leg.prompt) // 4,
            sampling=leg.sampling,
            tokens=leg.prompt if size <= self._bus.max_payload_bytes and not leg.media else b"",
            deadline_s=deadline_s,
            fetch=list(leg.fetch) if leg.phase is Phase.PREFILL else [],
            branch=leg.branch,
            version=leg.version,
            cache_salt=tenant_salt(leg.tenant),
            cached_tokens=leg.cached_tokens,
            traceparent=leg.traceparent,
            resume=leg.resume,
            media=list(leg.media),
        )
