"""Following the directory's word on which copies are referenced, and asking for all of it when some was missed."""

import asyncio
import random

from schemas.codec import RejectedMessage, encode
from schemas.directory import ReferencesQuery
from schemas.kv import KV_REFERENCE
from schemas.subjects import Subjects
from services.bus import Bus, BusError, Delivery
from services.kvpool.core.references import ReferenceFollower
from services.kvpool.metrics import PoolMetrics
from services.kvpool.store import Store
from services.observe import RateLimitedLog

ASK_TIMEOUT_S = 1.0
ASK_AGAIN_S = 1.0
"""Between two questions, drawn from [half, whole and a half)."""


class References:
    """Applies `kv.reference` messages to the store in order; asks the directory while it is behind."""

    def __init__(
        self, bus: Bus, subjects: Subjects, node: str, store: Store, metrics: PoolMetrics, log: RateLimitedLog
    ) -> None:
        self._bus, self._node, self._store = bus, node, store
        self._subject, self._question = subjects.kv_reference(node), subjects.query_directory("references")
        self._metrics, self._log = metrics, log
        self.follower = ReferenceFollower()
        self._behind = asyncio.Event()
        self._behind.set()

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Follow from now on."""
        await self._bus.subscribe(self._subject, self._on_message, on_dropped=lambda _: self._lost())
        self._bus.on_reconnect(self._on_reconnect)
        tasks.create_task(self._ask_while_behind(), name="kv.reference questions")

    async def _on_reconnect(self) -> None:
        self._lost()

    def _lost(self) -> None:
        """What was said meanwhile did not reach us, and the next message may be long in coming: ask."""
        self.follower.lose()
        self._behind.set()

    async def _on_message(self, delivery: Delivery) -> None:
        try:
            message = KV_REFERENCE.decode(delivery.data)
        except RejectedMessage as error:
            self._metrics.rejected.labels("kv.reference", error.reason).inc()
            self._log.warning("rejected_message", kind="reference", error=str(error))
            return
        if message.incarnation < self.follower.incarnation:
            self._log.warning("older_directory", incarnation=message.incarnation, known=self.follower.incarnation)
        for ready in self.follower.accept(message):
            for _ in self._store.refer(ready):
                await asyncio.sleep(0)
        if self.follower.behind:
            self._behind.set()

    async def _ask_while_behind(self) -> None:
        """The answer comes as a full message on our subject; a lost one is asked for again."""
        while True:
            await self._behind.wait()
            if not self.follower.behind:
                self._behind.clear()
                continue
            question = ReferencesQuery(node=self._node, incarnation=self.follower.incarnation)
            try:
                await self._bus.request(self._question, encode(question), ASK_TIMEOUT_S)
            except BusError as error:
                self._log.warning("references_unknown", error=str(error))
            await asyncio.sleep(ASK_AGAIN_S * random.uniform(0.5, 1.5))
