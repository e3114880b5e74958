"""Fetches: bring a prefix here from whoever has it, and keep it pinned.

A fetch pins what is here, has the rest pulled in batches from the named sources, and ends when everything is here, when
no source is left for the next missing block, or at its deadline. Blocks on their way for somebody else are waited for,
not copied twice.
"""

import asyncio

from schemas.pool import FetchReply, FetchRequest, PoolSource, digests_of
from services.clock import Clock
from services.kvpool.core.blocks import Presence
from services.kvpool.metrics import PoolMetrics
from services.kvpool.pull import Pull, Puller
from services.kvpool.store import Store

SLICE_BLOCKS = 256
"""Blocks looked at before other work gets its turn."""
PULL_BLOCKS = 64
PULL_BYTES = 32 << 20
PULLS_PER_NODE = 2


class Fetcher:
    """All fetches of this node."""

    def __init__(
        self,
        store: Store,
        puller: Puller,
        clock: Clock,
        tasks: asyncio.TaskGroup,
        metrics: PoolMetrics,
        *,
        node: str,
    ) -> None:
        self.store, self.clock, self.node = store, clock, node
        self._puller, self._tasks, self._metrics = puller, tasks, metrics
        self._running: dict[str, _Fetch] = {}
        self.coming: dict[bytes, None] = {}
        """Digests of all pulls that are not over."""
        self.pull_blocks = max(1, min(PULL_BLOCKS, PULL_BYTES // store.arena.layout.slot_bytes))
        store.on_change(self._on_change)

    async def fetch(self, request: FetchRequest, owner: int | None, ttl_s: float | None = None) -> FetchReply:
        """Carry out one request; the leading run stays pinned under its id. One of the same id is cancelled."""
        self.cancel(request.id)
        if request.media:
            self.store.note_media(request.digests, request.media)
        fetch = _Fetch(self, request, owner, ttl_s)
        self._running[request.id] = fetch
        try:
            reply = await fetch.run()
        finally:
            if self._running.get(request.id) is fetch:
                del self._running[request.id]
        outcome = "all" if reply.blocks == len(fetch.digests) else "some" if reply.blocks else "none"
        self._metrics.fetch_seconds.labels(outcome).observe(reply.took_s)
        if reply.reason == "deadline":
            self._metrics.deadline_exceeded.inc()
        return reply

    def cancel(self, id_: str) -> None:
        """End a fetch now, with nothing pinned; an unknown id is fine, and the pin of an ended fetch stays."""
        fetch = self._running.get(id_)
        if fetch is not None:
            fetch.cancel()

    def release(self, id_: str) -> None:
        """End a pin, and the fetch that is making it."""
        self.cancel(id_)
        self.store.unpin(id_)

    def cancel_owner(self, owner: int) -> None:
        """End the fetches of a lost connection."""
        for fetch in list(self._running.values()):
            if fetch.owner == owner:
                fetch.cancel()

    def start(self, pull: Pull) -> None:
        """Run a pull for a fetch."""
        self.coming.update(dict.fromkeys(pull.digests))
        self._tasks.create_task(self._puller.run(pull, lambda: self._over(pull)), name=f"pull from {pull.node}")

    def _over(self, pull: Pull) -> None:
        for digest in pull.digests:
            self.coming.pop(digest, None)
        for fetch in self._running.values():
            fetch.changed.set()

    def _on_change(self) -> None:
        for fetch in self._running.values():
            fetch.look()


class _Fetch:
    """One fetch under way."""

    def __init__(self, fetcher: Fetcher, request: FetchRequest, owner: int | None, ttl_s: float | None) -> None:
        self._fetcher, self._store, self._clock = fetcher, fetcher.store, fetcher.clock
        self._request, self.owner, self._ttl_s = request, owner, ttl_s
        self.digests = digests_of(request.digests)
        self._slots: list[int | None] = [None] * len(self.digests)
        self._began_s = self._clock.now()
        self._deadline_s = self._began_s + request.deadline_s
        self._pulls: list[Pull] = []
        self._tried: dict[bytes, set[str]] = {}
        self._arrived: dict[bytes, tuple[int, int, int]] = {}
        self._transports: dict[str, None] = {}
        self._awaited: bytes | None = None
        self._cancelled = False
        self._no_room = False
        self._reason = ""
        self.changed = asyncio.Event()

    def cancel(self) -> None:
        """Nobody wants it any more."""
        self._cancelled = True
        self._store.unpin(self._request.id)
        self.changed.set()

    def look(self) -> None:
        """Something changed in the store: go on if it is the block we wait for."""
        if self._awaited is not None and not self._is_coming(self._awaited):
            self.changed.set()

    async def run(self) -> FetchReply:
        self._store.open_pin(self._request.id, self.owner, self._ttl_s)
        try:
            await self._bring()
        finally:
            for pull in self._pulls:
                pull.stop.set()
        return self._settled()

    async def _bring(self) -> None:
        """Until everything is here, or nothing more will come."""
        while True:
            self.changed.clear()
            await self._pin_missing()
            if self._cancelled:
                return
            if self.changed.is_set():  # a pull ended meanwhile: count it, and pin what it brought, before planning
                self._awaited = None
                self._collect()
                continue
            if not self._plan():
                return
            left_s = self._deadline_s - self._clock.now()
            try:
                async with asyncio.timeout(max(0.0, left_s)):
                    await self.changed.wait()
            except TimeoutError:
                self._collect()
                await self._pin_missing()
                self._reason = "deadline"
                return
            self._collect()

    async def _pin_missing(self) -> None:
        """Pin what is here by now, in slices; adopted blocks are checked first."""
        for start in range(0, len(self.digests), SLICE_BLOCKS):
            missing = [i for i in range(start, min(start + SLICE_BLOCKS, len(self.digests))) if self._slots[i] is None]
            if not missing or self._cancelled:
                continue
            found = self._store.pin(self._request.id, b"".join(self.digests[i] for i in missing))
            if not await self._store.verify(found):
                readable = self._store.core.blocks.is_readable
                found = [slot if slot is not None and readable(slot) else None for slot in found]
            for i, slot in zip(missing, found, strict=True):
                self._slots[i] = slot
            await asyncio.sleep(0)

    def _plan(self) -> bool:
        """Start pulls for what is missing, in order; False when there is nothing to wait for.

        The first block that nobody can give ends it: what lies beyond a gap is of no use.
        """
        self._awaited = None
        waiting = False
        pulls: list[Pull] = []
        i = self._request.device_blocks
        while i < len(self.digests):
            at, digest = i, self.digests[i]
            i += 1
            if self._slots[at] is not None:
                continue
            if self._is_coming(digest):
                self._awaited = self._awaited or digest
                waiting = True
                continue
            source = self._source(at)
            if source is None:
                break
            waiting = True
            if not self._add(pulls, source.node, at):
                i = source.last  # its turn comes when one of this node's pulls is over
        for pull in pulls:
            self._pulls.append(pull)
            self._fetcher.start(pull)
        return waiting

    def _is_coming(self, digest: bytes) -> bool:
        return digest in self._fetcher.coming or self._store.core.presence(digest) is Presence.WRITING

    def _source(self, index: int) -> PoolSource | None:
        """Who may be asked for a block and was not yet."""
        tried = self._tried.get(self.digests[index], ())
        for source in self._request.sources if not self._no_room else ():
            if source.first <= index < source.last and source.node != self._fetcher.node and source.node not in tried:
                return source
        return None

    def _add(self, pulls: list[Pull], node: str, index: int) -> bool:
        """Put a block into the last pull if it continues it, else into a new one; False if the node is busy."""
        last = pulls[-1] if pulls else None
        if (
            last is not None
            and last.node == node
            and last.first + len(last.digests) == index
            and len(last.digests) < self._fetcher.pull_blocks
        ):
            last.digests.append(self.digests[index])
            return True
        if sum(pull.node == node for pull in (*self._pulls, *pulls)) >= PULLS_PER_NODE:
            return False
        parent = self.digests[index - 1] if index else b""
        pulls.append(Pull(node, [self.digests[index]], parent, index, self._deadline_s, self._request.id))
        return True

    def _collect(self) -> None:
        """Note what the pulls that are over have brought, and who could not give what."""
        for pull in [pull for pull in self._pulls if pull.over]:
            self._pulls.remove(pull)
            self._arrived.update(pull.arrived)
            if pull.arrived:
                self._transports[pull.transport] = None
            self._no_room = self._no_room or pull.no_room
            self._reason = pull.reason or self._reason
            for digest in pull.digests:
                if digest not in pull.arrived:
                    self._tried.setdefault(digest, set()).add(pull.node)

    def _settled(self) -> FetchReply:
        """Keep the leading run pinned. What came beyond a gap stays unpinned: computing the gap makes it of use."""
        whole, device = len(self.digests), min(self._request.device_blocks, len(self.digests))
        blocks = 0 if self._cancelled else next((i for i in range(device, whole) if self._slots[i] is None), whole)
        if not self._cancelled and blocks < whole:
            kept = [slot for slot in self._slots[:blocks] if slot is not None]
            self._store.core.keep_pinned(self._request.id, kept)
        fetched = [self._arrived[digest] for digest in self.digests[:blocks] if digest in self._arrived]
        return FetchReply(
            blocks=blocks,
            fetched=len(fetched),
            bytes=sum(size for _, _, size in fetched),
            took_s=self._clock.now() - self._began_s,
            transport="+".join(self._transports),
            reason="" if blocks == whole else "released" if self._cancelled else self._reason or "no source",
        )
