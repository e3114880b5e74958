"""The legs inside the timed engine and the device memory they hold."""

from dataclasses import dataclass, field

from schemas.block_key import full_blocks
from schemas.phase import Phase
from schemas.serve import Finish, RequestState
from services.engine.backend import Leg, LegKey
from services.engine.core.batching import DecodeWork, PrefillWork
from services.engine.timed.content import Context
from services.engine.timed.device import DeviceCache
from services.engine.timed.settings import TimedSettings


@dataclass(slots=True)
class Hold:
    """Device memory of one leg, or of both legs of a request that runs on this node alone.

    `locked`: its shared blocks, from the start of the context; `private`: blocks still to be filled.
    """

    locked: list[bytes]
    private: int
    legs: int = 1


@dataclass(slots=True)
class TimedLeg:
    """One leg inside. `prefill` or `decode` is its work while it may be in a batch, None before and afterwards.

    `loading`: its prefix is being read. `batched`: the iteration that runs now contains it. `moving`: its KV is on the
    way between two devices, so its memory must stay as it is. `writes`: runs of blocks on their way to host memory.
    `reply`: the tokens a script answers with, None without one. `ending`: how it ends when it may.
    """

    leg: Leg
    context: Context
    hold: Hold
    state: RequestState = RequestState.RESERVED
    prefill: PrefillWork | None = None
    decode: DecodeWork | None = None
    loading: bool = False
    batched: bool = False
    moving: bool = False
    delivered: int = 0
    writes: int = 0
    written_blocks: int = 0
    cached_tokens: int = 0
    restored_tokens: int = 0
    reply: list[int] | None = None
    ending: tuple[Finish, str] | None = None

    @property
    def key(self) -> LegKey:
        return self.leg.key


@dataclass(slots=True)
class Memory:
    """Device memory, leg by leg. One block is never in two holds as private, and never free while a hold has it."""

    settings: TimedSettings
    device: DeviceCache
    holds: dict[LegKey, Hold] = field(default_factory=dict)

    def open(self, leg: Leg) -> Hold:
        """Take what this leg needs. A prefill leg uses the memory of its decode leg if that is here."""
        pair = self.holds.get(leg.key._replace(phase=Phase.DECODE))
        if leg.key.phase is Phase.PREFILL and pair is not None:
            pair.legs += 1
            self.holds[leg.key] = pair
            return pair
        output = 1 if leg.key.phase is Phase.PREFILL else leg.sampling.max_new_tokens
        blocks = -(-(leg.prompt_tokens + output) // self.settings.block_size)
        hits = list(leg.digests[: self.device.hits(leg.digests)])
        self.device.lock(hits)
        self.device.take(blocks - len(hits))
        hold = Hold(hits, blocks - len(hits))
        self.holds[leg.key] = hold
        return hold

    def publish(self, hold: Hold, digests: list[bytes], count: int, phase: Phase) -> None:
        """The first `count` blocks of a context are full: share those that are not yet."""
        fresh = digests[len(hold.locked) : count]
        if fresh:
            parent = hold.locked[-1] if hold.locked else b""
            self.device.publish(fresh, parent, by_prefill=phase is Phase.PREFILL)
            hold.private -= len(fresh)
            hold.locked += fresh

    def close(self, key: LegKey) -> None:
        """The leg holds nothing any more; memory shared with its pair goes with the last of the two."""
        hold = self.holds.pop(key)
        hold.legs -= 1
        if hold.legs == 0:
            self.device.give(hold.private)
            self.device.unlock(hold.locked)

    def usable_blocks(self, leg: Leg) -> int:
        """Leading blocks a prefill may reuse: its last token is always computed."""
        return full_blocks(leg.prompt_tokens - 1, self.settings.block_size, self.settings.key_version)

    def check(self) -> None:
        self.device.check()
        holds = {id(hold): hold for hold in self.holds.values()}
        assert sum(hold.private for hold in holds.values()) == self.device.private
        for hold in holds.values():
            assert hold.legs == sum(other is hold for other in self.holds.values())
            assert hold.private >= 0, hold
