"""What other pools and engine services ask over NATS: lease, release, locate, fetch, store."""

from collections.abc import Awaitable, Callable

import msgspec

from schemas.codec import Message, RejectedMessage, encode
from schemas.pool import (
    FETCH_REQUEST,
    LEASE_REQUEST,
    LOCATE_REQUEST,
    RELEASE_REQUEST,
    Empty,
    FetchReply,
    FetchRequest,
    LeaseReply,
    LocateReply,
)
from schemas.subjects import Subjects
from services.bus import Bus, Delivery, Responder
from services.kvpool.fetch import Fetcher
from services.kvpool.metrics import PoolMetrics
from services.kvpool.store import Store
from services.kvpool.transfer import TransportError
from services.kvpool.transfer.mooncake import MooncakeTransport
from services.observe import RateLimitedLog

PIN_SPARE_S = 60.0
"""A pin made over NATS has no connection to end with: it ends this long after the deadline of its fetch."""
PREFIX = "bus."
_Answer = Callable[[bytes], Awaitable[Message]]


class PeerServer:
    """Answers peers. A request that is none gets a typed error and is counted.

    `network` opens our arena to other hosts, None where the settings do not allow it; `always` does so for every asker.
    """

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        node: str,
        store: Store,
        fetcher: Fetcher,
        metrics: PoolMetrics,
        log: RateLimitedLog,
        *,
        host: str,
        network: MooncakeTransport | None,
        always: bool,
    ) -> None:
        self._bus, self._subjects, self._node = bus, subjects, node
        self._store, self._fetcher, self._metrics, self._log = store, fetcher, metrics, log
        self._host, self._network, self._always = host, network, always

    async def start(self) -> None:
        """Answer from now on."""
        answers: dict[str, tuple[_Answer, Callable[[str], Message]]] = {
            "lease": (self._lease, lambda text: LeaseReply(slots=[], incarnation=self._incarnation, error=text)),
            "release": (self._release, lambda _: Empty()),
            "locate": (self._locate, lambda _: LocateReply(blocks=0)),
            "fetch": (self._fetch, lambda text: FetchReply(blocks=0, reason=text)),
            "store": (self._keep, lambda text: FetchReply(blocks=0, reason=text)),
        }
        for verb, (answer, refusal) in answers.items():
            await self._bus.respond(self._subjects.pool(verb, self._node), self._responder(verb, answer, refusal))

    @property
    def _incarnation(self) -> int:
        return self._store.core.log.incarnation

    def _responder(self, verb: str, answer: _Answer, refusal: Callable[[str], Message]) -> Responder:
        async def respond(request: Delivery) -> bytes:
            try:
                reply = await answer(request.data)
            except RejectedMessage as error:
                self._metrics.rejected.labels(f"pool.{verb}", error.reason).inc()
                self._metrics.calls.labels(verb, "bus", "rejected").inc()
                self._log.warning("rejected_request", kind=verb, verb=verb, error=str(error))
                return encode(refusal(str(error)))
            self._metrics.calls.labels(verb, "bus", "ok").inc()
            return encode(reply)

        return respond

    async def _lease(self, data: bytes) -> Message:
        """Hold what is here; blocks that a former pool left are checked before anybody reads them."""
        request = LEASE_REQUEST.decode(data)
        slots = self._store.lease(request)
        if not await self._store.verify([info.slot for info in slots]):
            slots = self._store.lease(request)
        session, address = "", 0
        if self._network is not None and (self._always or request.host != self._host):
            try:
                session, address = await self._network.session()
            except TransportError as error:
                self._log.warning("no_network_transport", error=str(error))
        return self._store.lease_reply(slots, self._host, session, address)

    async def _release(self, data: bytes) -> Message:
        id_ = RELEASE_REQUEST.decode(data).id
        self._store.end_lease(id_)
        self._fetcher.release(PREFIX + id_)
        return Empty()

    async def _locate(self, data: bytes) -> Message:
        return LocateReply(blocks=self._store.core.locate(LOCATE_REQUEST.decode(data).digests))

    async def _fetch(self, data: bytes) -> Message:
        """As over the socket, but the pin ends by itself some time after the deadline."""
        request = _apart(FETCH_REQUEST.decode(data))
        return await self._fetcher.fetch(request, None, request.deadline_s + PIN_SPARE_S)

    async def _keep(self, data: bytes) -> Message:
        """Bring blocks here and pin nothing: a second copy, for whoever may need it."""
        request = _apart(FETCH_REQUEST.decode(data))
        reply = await self._fetcher.fetch(request, None, request.deadline_s + PIN_SPARE_S)
        self._fetcher.release(request.id)
        return reply


def _apart(request: FetchRequest) -> FetchRequest:
    """Ids that come over NATS never meet those of the own engine."""
    return msgspec.structs.replace(request, id=PREFIX + request.id)
