"""The other engines: ask them for room, tell them that a prefill is done or will not come."""

import asyncio

from structlog.typing import FilteringBoundLogger

from schemas.codec import RejectedMessage, encode
from schemas.serve import HANDOFF_REPLY, Handoff, HandoffReply, HandoffVerb
from schemas.subjects import Subjects
from services.bus import Bus, BusError, NoResponders
from services.engine.backend import BackendInfo
from services.engine.core.effects import Ask, Tell
from services.engine.core.prefill import GONE

_TRIES = 3
_AGAIN_S = 0.1


def handoff_message(verb: HandoffVerb, effect: Ask | Tell, node: str, info: BackendInfo) -> Handoff:
    """What this node says to the other one about a request."""
    told = effect if isinstance(effect, Tell) else None
    return Handoff(
        verb=verb,
        id=effect.key.id,
        attempt=effect.key.attempt,
        node=node,
        room=effect.room,
        rendezvous=info.rendezvous,
        token=told.token if told else None,
        reason=told.reason if told else "",
    )


class Peers:
    """Hand-off messages to other nodes. Every answer comes within a few `timeout_s`, if only as None."""

    def __init__(self, bus: Bus, subjects: Subjects, timeout_s: float, log: FilteringBoundLogger) -> None:
        self._bus, self._subjects, self._timeout_s, self._log = bus, subjects, timeout_s, log

    async def ask(self, peer: str, message: Handoff) -> HandoffReply | None:
        """One question. `gone` when nobody listens there, None when no answer came in time."""
        try:
            data = await self._bus.request(self._subjects.handoff(peer), encode(message), self._timeout_s)
            return HANDOFF_REPLY.decode(data)
        except NoResponders:
            return HandoffReply(granted=False, reason=GONE)
        except (BusError, RejectedMessage) as error:
            self._log.info("handoff_unanswered", peer=peer, verb=message.verb, request=message.id, error=str(error))
            return None

    async def tell(self, peer: str, message: Handoff) -> str:
        """Say something that must arrive, several times if need be; "" when it has, else why not."""
        reply: HandoffReply | None = None
        for attempt in range(_TRIES):
            if attempt:
                await asyncio.sleep(_AGAIN_S)
            reply = await self.ask(peer, message)
            if reply is not None and reply.reason != GONE:
                return "" if reply.granted else reply.reason
        return "did not answer" if reply is None else reply.reason
