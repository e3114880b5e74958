"""One pull: a batch of blocks from one peer. Lease, allocate, copy, commit, release."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any

from schemas.codec import RejectedMessage, encode
from schemas.pool import LEASE_REPLY, AllocateRequest, CommitRequest, LeaseReply, LeaseRequest, ReleaseRequest
from schemas.subjects import Subjects
from services.bus import Bus, BusError
from services.clock import Clock
from services.kvpool.metrics import PoolMetrics
from services.kvpool.store import Store
from services.kvpool.transfer import BlockCopy, CopyJob, Outcome, Transport, TransportError

LEASE_TIMEOUT_S = 2.0
"""A pool that lives answers a lease in milliseconds; one that does not answer is passed over in this fetch only."""
LEASE_SPARE_S = 5.0
LEASE_MAX_S = 600.0


@dataclass(eq=False)
class Pull:
    """A run of blocks to bring here from `node`: `digests` begin at index `first` of their context, after `parent`.

    What comes is held under `pin` while that is open. `over` says that its fetch need not wait any longer; slots may
    still be in the air then.
    """

    node: str
    digests: list[bytes]
    parent: bytes
    first: int
    deadline_s: float
    pin: str
    over: bool = False
    arrived: dict[bytes, tuple[int, int, int]] = field(default_factory=dict)
    """(slot, generation, bytes) of each block that came."""
    transport: str = ""
    outcome: str = "arrived"
    reason: str = ""
    """Why not all came; "" if they did."""
    no_room: bool = False
    leased: bool = False
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by the fetch when it needs no more of this."""


class Puller:
    """Runs pulls. Never raises for what a peer does: every way a pull can end is in its `reason`."""

    def __init__(
        self,
        store: Store,
        bus: Bus,
        subjects: Subjects,
        transports: Sequence[Transport],
        clock: Clock,
        metrics: PoolMetrics,
        *,
        host: str,
    ) -> None:
        self._store, self._bus, self._subjects = store, bus, subjects
        self._transports, self._clock, self._metrics, self._host = transports, clock, metrics, host
        self._not_near: set[tuple[str, int]] = set()
        """(node, incarnation) of peers under this kernel whose arena is in another mount and cannot be mapped."""

    async def run(self, pull: Pull, on_over: Callable[[], None]) -> None:
        """Carry out a pull. `on_over` comes at its deadline at the latest; this returns when no slot is in the air."""
        owner, lease_id = self._store.new_owner(), token_hex(8)
        try:
            job = await self._begin_and_wait(pull, owner, lease_id)
        finally:
            pull.over = True
            on_over()
        self._metrics.pulls.labels(pull.outcome).inc()
        if pull.leased:
            await self._release(pull.node, lease_id)
        if job is not None:
            await self._land(job, owner)

    async def _begin_and_wait(self, pull: Pull, owner: int, lease_id: str) -> CopyJob | None:
        """Everything up to `over`; the copy if it has not ended by then."""
        found = await self._lease(pull, lease_id)
        if found is None:
            return None
        lease, transport = found
        pull.transport = transport.name
        try:
            copies = self._allocate(pull, lease, owner)
            if not copies:
                return None
            job = await transport.begin(lease, copies)
            if await self._in_time(pull, job.done, self._left_s(pull)):
                self._take_in(pull, job, owner)
                return None
            job.stop()
            pull.outcome, pull.reason = "late", "deadline"
            self._store.drop_owner(owner, ends=False)
            return job
        except TransportError as error:
            pull.outcome, pull.reason = "transport", str(error)
            self._store.end_owner(owner)
            return None

    async def _land(self, job: CopyJob, owner: int) -> None:
        """Late bytes: wait until none come any more, then use the slots again."""
        await job.done
        self._metrics.undelivered.labels("late").inc(len(job.blocks))
        if Outcome.UNSETTLED not in job.outcomes:
            self._store.end_owner(owner)

    @staticmethod
    async def _in_time(pull: Pull, future: asyncio.Future[Any], timeout_s: float) -> bool:
        """Wait for a future; False if the time was over, or the fetch ended, before it."""
        stopped = asyncio.ensure_future(pull.stop.wait())
        waiting: set[asyncio.Future[Any]] = {future, stopped}
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        return future.done() and not pull.stop.is_set()

    def _left_s(self, pull: Pull) -> float:
        return max(0.0, pull.deadline_s - self._clock.now())

    async def _lease(self, pull: Pull, lease_id: str) -> tuple[LeaseReply, Transport] | None:
        """A lease, and the transport that reaches it. A peer that seems near and is not is asked again as a far one."""
        for host in (self._host, ""):
            lease = await self._ask(pull, lease_id, host)
            if lease is None:
                return None
            if lease.slots and lease.layout == str(self._store.identity):
                transport = next((t for t in self._transports if t.reaches(lease)), None)
                if transport is not None:
                    return lease, transport
                pull.outcome, pull.reason = "transport", f"no transport reaches {pull.node}"
                if host and (pull.node, lease.incarnation) not in self._not_near:
                    self._not_near.add((pull.node, lease.incarnation))
                    continue
            elif lease.slots:
                pull.outcome = "layout"
                pull.reason = f"{pull.node} holds blocks of {lease.layout}, here are {self._store.identity}"
            else:
                pull.outcome, pull.reason = "gone", f"{pull.node} does not have it"
            return None
        return None

    async def _ask(self, pull: Pull, lease_id: str, host: str) -> LeaseReply | None:
        left_s = self._left_s(pull)
        request = LeaseRequest(
            id=lease_id,
            digests=b"".join(pull.digests),
            ttl_s=min(left_s + LEASE_SPARE_S, LEASE_MAX_S),
            host=host,
        )
        subject = self._subjects.pool("lease", pull.node)
        asked = asyncio.ensure_future(self._bus.request(subject, encode(request), min(left_s, LEASE_TIMEOUT_S)))
        try:
            if not await self._in_time(pull, asked, left_s):
                asked.cancel()
                pull.outcome, pull.reason = "late", "deadline"
                return None
            lease = LEASE_REPLY.decode(asked.result())
        except RejectedMessage as error:
            self._metrics.rejected.labels("pool.lease", error.reason).inc()
            pull.outcome, pull.reason = "refused", str(error)
            return None
        except BusError as error:
            pull.outcome, pull.reason = "unreachable", str(error)
            return None
        if lease.error:
            pull.outcome, pull.reason = "refused", lease.error
            return None
        pull.leased = True
        return lease

    def _allocate(self, pull: Pull, lease: LeaseReply, owner: int) -> list[BlockCopy]:
        """Own slots for the leased blocks; what has come here meanwhile needs none."""
        digests = pull.digests[: len(lease.slots)]
        if len(digests) < len(pull.digests):
            pull.outcome, pull.reason = "gone", f"{pull.node} does not have all of it"
        request = AllocateRequest(digests=b"".join(digests), parent=pull.parent)
        reply = self._store.allocate(request, owner, pull.first)
        if reply.refused:
            pull.outcome, pull.reason, pull.no_room = "room", f"no room for {reply.refused} blocks", True
        return [
            BlockCopy(source, digest, slot[0])
            for source, digest, slot in zip(lease.slots, digests, reply.slots, strict=False)
            if slot is not None
        ]

    def _take_in(self, pull: Pull, job: CopyJob, owner: int) -> None:
        """Commit what arrived and was checked, give the other slots back, keep from use what may still be written."""
        job.done.result()
        generation = self._store.core.blocks.slots.generation
        arrived = []
        abandon = []
        for block, outcome in zip(job.blocks, job.outcomes, strict=True):
            source = block.source
            if outcome is Outcome.ARRIVED:
                arrived.append((block.slot, generation[block.slot], source.length, source.fingerprint))
                pull.arrived[block.digest] = (block.slot, generation[block.slot], source.length)
                continue
            self._metrics.undelivered.labels(outcome.value).inc()
            pull.outcome, pull.reason = outcome.value, f"{outcome.value} at {pull.node}"
            if outcome is not Outcome.UNSETTLED:
                abandon.append((block.slot, generation[block.slot]))
        self._store.commit(CommitRequest(slots=arrived, abandon=abandon), owner)
        self._store.pin(pull.pin, b"".join(pull.arrived))
        self._store.drop_owner(owner, ends=False)
        self._metrics.fetched_blocks.labels(pull.transport).inc(len(arrived))
        self._metrics.fetched_bytes.labels(pull.transport).inc(sum(entry[2] for entry in arrived))

    async def _release(self, node: str, lease_id: str) -> None:
        """End the lease; one whose release is lost ends by itself."""
        with contextlib.suppress(BusError):
            await self._bus.publish(self._subjects.pool("release", node), encode(ReleaseRequest(id=lease_id)))
