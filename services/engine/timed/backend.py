"""The timed engine: an iteration takes as long as a model says, and leaves real blocks and checkable tokens behind."""

import asyncio
from collections.abc import Iterable

from schemas.kv import LocationChange
from schemas.phase import Phase
from schemas.serve import Finish, RequestState
from services.clock import Clock
from services.engine.backend import BackendEvents, BackendInfo, Leg, LegKey
from services.engine.core.batching import DecodeWork, PrefillWork
from services.engine.core.timing import PRESETS
from services.engine.timed.content import Context
from services.engine.timed.device import DeviceCache
from services.engine.timed.loop import TimedLoop
from services.engine.timed.pace import Pace, Sleep
from services.engine.timed.sampler import Sampler
from services.engine.timed.script import load_script
from services.engine.timed.settings import TimedSettings
from services.engine.timed.state import Memory, TimedLeg
from services.engine.timed.store import BlockStore, WrongBlock
from services.engine.timed.writer import Writer

WRITE_GRACE_S = 0.1
"""How long the end of a leg waits for its blocks to be in host memory, so that the next request finds them."""
_AT_ONCE = (Finish.CANCELLED, Finish.ERROR)
"""Ends that do not wait for blocks to be written."""
_RESTORE_AT_ONCE = 64
"""Blocks read before other legs get their turn."""


class TimedBackend:
    """A `Backend` without a model. `sleep` lets tests hold an iteration or a transfer."""

    def __init__(
        self, settings: TimedSettings, store: BlockStore, clock: Clock, *, sleep: Sleep = asyncio.sleep
    ) -> None:
        self.info = BackendInfo(
            engine="timed",
            model=settings.model,
            dtype="none",
            block_size=settings.block_size,
            block_bytes=settings.block_bytes,
            key_version=settings.key_version,
            ranks=1,
            l1_tokens=settings.device_tokens,
            max_context_tokens=settings.max_context_tokens,
            max_running=settings.max_running,
            batch_tokens=settings.batch_tokens,
            tokenizer=settings.tokenizer,
            shared_pair=True,
            experts_per_token=PRESETS[settings.preset].experts[0],
            experts=PRESETS[settings.preset].experts[1],
        )
        self.wrong_blocks = 0
        self.wrong_tokens = 0
        self.memory = Memory(settings, DeviceCache(settings.device_tokens // settings.block_size))
        self.legs: dict[LegKey, TimedLeg] = {}
        self._settings, self._store, self._sleep = settings, store, sleep
        self._script = load_script(settings)
        self._preset = PRESETS[settings.preset]
        self._sampler = Sampler(settings)
        self._writer = Writer(store, self._written)
        self._loop = TimedLoop(self, settings, self._preset, self._sampler, clock, Pace(clock, settings.speed, sleep))
        self._events: BackendEvents
        self._tasks: asyncio.TaskGroup
        self._running: asyncio.Task[None] | None = None

    async def start(self, events: BackendEvents) -> None:
        """Ready at once."""
        self._events = events
        started = asyncio.Event()
        self._running = asyncio.get_running_loop().create_task(self._run(started), name="timed engine")
        await started.wait()

    async def _run(self, started: asyncio.Event) -> None:
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self._loop.run(), name="iterations")
                self._tasks.create_task(self._writer.run(), name="write-through")
                started.set()
        except ExceptionGroup as group:
            self._events.failed("; ".join(f"{type(error).__name__}: {error}" for error in group.exceptions))
            raise

    def submit(self, leg: Leg) -> None:
        """Take the leg's memory now; a prefill leg starts to load its prefix at once."""
        settings = self._settings
        timed = TimedLeg(leg, Context(leg, settings.block_size, settings.key_version), self.memory.open(leg))
        if self._script is not None:
            timed.reply = self._script.reply(leg)
        self.legs[leg.key] = timed
        if leg.key.phase is Phase.PREFILL:
            timed.loading = True
            self._tasks.create_task(self._load(timed), name=f"load {leg.key.id}")
        self.tell_device_changes()

    async def _load(self, timed: TimedLeg) -> None:
        """Use what is in device memory, bring what host memory has beyond it; then the prompt may be computed."""
        leg, memory = timed.leg, self.memory
        usable = memory.usable_blocks(leg)
        hits = min(len(timed.hold.locked), usable)
        memory.device.used_by_prefill(timed.hold.locked)
        restored, wrong = await self._restore(timed, hits, min(leg.restorable_blocks, usable))
        timed.loading = False
        if timed.ending is not None:
            self._close(timed)
            return
        if wrong:
            self.wrong_blocks += 1
            self.end(timed, Finish.ERROR, wrong)
            return
        memory.publish(timed.hold, timed.context.digests, hits + restored, Phase.PREFILL)
        self.tell_device_changes()
        size = self._settings.block_size
        timed.cached_tokens, timed.restored_tokens = (hits + restored) * size, restored * size
        timed.written_blocks = hits + restored
        media = sum(medium.first + medium.tokens > timed.cached_tokens for medium in leg.media)
        timed.prefill = PrefillWork(leg.prompt_tokens, timed.cached_tokens, timed.restored_tokens, media)
        self._loop.wake()

    async def _restore(self, timed: TimedLeg, first: int, last: int) -> tuple[int, str]:
        """Read blocks [first, last) of the prompt until one is missing; how many came, and what was wrong with one."""
        came = 0
        while first + came < last and timed.ending is None:
            part = timed.leg.digests[first + came : min(last, first + came + _RESTORE_AT_ONCE)]
            try:
                found = self._store.restore(part)
            except WrongBlock as error:
                return came, str(error)
            came += found
            if found < len(part):
                break
            await asyncio.sleep(0)
        return came, ""

    def cancel(self, key: LegKey) -> None:
        """Stop a leg; one in the running iteration ends with it, one whose KV is moving when that has arrived."""
        timed = self.legs.get(key)
        if timed is None:
            return
        self.stop_leg(timed, Finish.CANCELLED, "")

    def stop_leg(self, timed: TimedLeg, finish: Finish, reason: str) -> None:
        """No more work for this leg; its end follows as soon as nothing touches its memory."""
        timed.ending = (finish, reason)
        timed.prefill = timed.decode = None
        if not (timed.batched or timed.moving or timed.loading):
            self._soon(timed)

    def prefilled(self, key: LegKey, token: int) -> None:
        """The first token, and the KV behind it: compare, then let it travel."""
        timed = self.legs.get(key)
        if timed is None or timed.ending is not None or timed.delivered:
            return
        expected = self._sampler.peek(timed)
        if token != expected:
            self.wrong_tokens += 1
            self.end(timed, Finish.ERROR, f"the prefill's first token is {token}, its context gives {expected}")
            return
        _, finish = self._sampler.draw(timed)
        self._events.tokens(key, 0, [token])
        memory = self.memory
        memory.publish(timed.hold, timed.context.digests, len(timed.leg.digests), Phase.DECODE)
        timed.written_blocks = len(timed.leg.digests)
        self.tell_device_changes()
        if finish is not None:
            self.end(timed, finish, "")
        else:
            self.move(timed)

    def move(self, timed: TimedLeg) -> None:
        """The KV of the leg travels from device to device, on both sides for the same time; then it goes on."""
        timed.moving = True
        self.enter(timed, RequestState.TRANSFERRING)
        self._tasks.create_task(self._move(timed), name=f"transfer {timed.key.id}")

    async def _move(self, timed: TimedLeg) -> None:
        pair = timed.hold.legs > 1
        seconds = 0.0 if pair else self._preset.transfer_s(timed.leg.prompt_tokens) / self._settings.speed
        await self._sleep(seconds)
        timed.moving = False
        if timed.ending is not None:
            self._soon(timed)
        elif timed.key.phase is Phase.PREFILL:
            self.end(timed, Finish.HANDED_OFF, "")
        else:
            left = timed.leg.sampling.max_new_tokens - timed.delivered
            timed.decode = DecodeWork(timed.leg.prompt_tokens, left)
            self._loop.wake()

    def enter(self, timed: TimedLeg, state: RequestState) -> None:
        """Say once that a leg has come to a new state."""
        if timed.state is not state and timed.ending is None:
            timed.state = state
            self._events.state(timed.key, state)

    def keep(self, timed: TimedLeg, blocks: int) -> None:
        """The first `blocks` blocks of the context are full: share them on the device, write the new ones through."""
        self.memory.publish(timed.hold, timed.context.digests, blocks, timed.key.phase)
        self._writer.write(timed, timed.written_blocks, blocks)
        timed.written_blocks = max(timed.written_blocks, blocks)

    def end(self, timed: TimedLeg, finish: Finish, reason: str) -> None:
        """The work of a leg is done: it ends when its blocks are written, or shortly after."""
        if timed.writes and timed.ending is None and finish is not Finish.ERROR:
            timed.ending = (finish, reason)
            timed.prefill = timed.decode = None
            asyncio.get_running_loop().call_later(WRITE_GRACE_S, self._close, timed)
        elif timed.ending is None:
            self.stop_leg(timed, finish, reason)

    def _written(self, timed: TimedLeg) -> None:
        if timed.writes == 0 and timed.ending is not None and not (timed.batched or timed.moving):
            self._close(timed)

    def _soon(self, timed: TimedLeg) -> None:
        asyncio.get_running_loop().call_soon(self._close, timed)

    def _close(self, timed: TimedLeg) -> None:
        """Give everything back, then say so; once."""
        if self.legs.get(timed.key) is not timed or timed.ending is None:
            return
        del self.legs[timed.key]
        self.memory.close(timed.key)
        finish, reason = timed.ending
        self._events.ended(timed.key, finish, reason, timed.cached_tokens, timed.restored_tokens)

    def settle(self, batch: Iterable[TimedLeg]) -> None:
        """An iteration is over: legs that were stopped meanwhile end."""
        for timed in batch:
            timed.batched = False
            if timed.ending is not None and not timed.moving and (not timed.writes or timed.ending[0] in _AT_ONCE):
                self._close(timed)
        self.tell_device_changes()

    def tell_device_changes(self) -> None:
        changes: list[LocationChange] = self.memory.device.changes()
        if changes:
            self._events.device_changes(changes)

    @property
    def events(self) -> BackendEvents:
        return self._events

    def room(self, phase: Phase) -> int:
        """Device memory is one for both phases."""
        return self.memory.device.free_blocks * self._settings.block_size

    def used_tokens(self) -> int:
        return self.memory.device.used_blocks * self._settings.block_size

    def drop_decode_cache(self) -> None:
        self.memory.device.drop_unless_prefill()
        self.tell_device_changes()

    async def stop(self) -> None:
        """End all tasks; legs inside are abandoned."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
