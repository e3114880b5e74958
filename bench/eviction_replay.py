"""One replay of a sequence: the cores of a pool and of a directory in virtual time, one policy, one capacity."""

from collections import deque
from dataclasses import dataclass
from math import inf

import numpy as np

from bench.eviction_policies import POLICIES, Rival
from bench.eviction_sequence import Access, Sequence
from bench.eviction_trace import Blocks
from schemas.branch import BranchEvent, BranchEventType, BranchKind
from schemas.directory import MatchQuery
from schemas.kv import Capacities, KvReference, NodeHello, ReferenceChange, ValueChange
from schemas.pool import DIGEST_BYTES, AllocateRequest, CommitRequest
from services.directory.core.directory import Directory, DirectoryConfig
from services.directory.core.effects import Effect, ReferencesChanged, ValuesChanged
from services.kvpool.core.pool import PoolCore

NODE = "n"
KINDS = {"fork": BranchKind.FORK, "subagent": BranchKind.SUBAGENT}
EVENTS = {"fork": BranchEventType.FORK, "subagent": BranchEventType.SUBAGENT}
OWNER = 1
FINGERPRINT = bytes(16)
TICK_S = 1.0
WIRE_BYTES = 1 << 20
SLEPT_S = (300.0, 420.0)
"""Waits like the reference's 359 s."""


@dataclass
class Figures:
    """Blocks of prompts of the scored requests: read from the pool, and what unlimited memory would have given."""

    prompt: int = 0
    hit: int = 0
    ideal: int = 0
    refused: int = 0
    most_referenced: int = 0
    evicted_referenced: int = 0
    told_values: int = 0
    slept_ideal: int = 0
    slept_hit: int = 0
    left: int = 0
    left_kept: int = 0
    """`slept`: of requests after a wait of SLEPT_S. `left`: what compactions during those waits left behind."""

    @property
    def lost(self) -> float:
        """Lost KV reuse: the share of the ideal hit that was computed again."""
        return 1.0 - self.hit / self.ideal if self.ideal else 0.0


class Replay:
    """`policy` names one of POLICIES. The pool answers as the engine's service would use it: a prompt's prefix is
    pinned, the rest of it written; at the end of the request the answer is written and the pin ends."""

    def __init__(self, sequence: Sequence, policy: str, capacity_blocks: int) -> None:
        self.sequence, self.figures = sequence, Figures()
        self._told, self._valued, make = POLICIES[policy]
        self._rival: Rival | None = make(capacity_blocks, sequence.tokens_per_block)
        self.pool = PoolCore(NODE, 1, capacity_blocks, order=self._rival)
        self.directory = Directory(DirectoryConfig() if self._valued else DirectoryConfig(scarce_share=inf), 1)
        self._known = np.zeros(sequence.blocks, bool)
        self._references = 0
        self._tick_s = 0.0
        self._last: dict[str, Access] = {}
        self._left: deque[tuple[float, Blocks]] = deque(maxlen=256)
        if self._told:
            self._perform(self.directory.on_hello(_hello(capacity_blocks, sequence.tokens_per_block), 0.0))

    def run(self) -> Figures:
        """Every access in order."""
        for access in self.sequence.accesses:
            self._time(access.at_s)
            if access.begins:
                self._begin(access)
            else:
                self._end(access)
        self.figures.evicted_referenced = self.pool.counters.evicted_referenced
        return self.figures

    def _time(self, now: float) -> None:
        if self._rival is not None:
            self._rival.advance(now)
        while self._told and self._tick_s <= now:
            self.directory.on_location(self.pool.log.heartbeat(), self._tick_s)
            self._perform(self.directory.tick(self._tick_s))
            self._tick_s += TICK_S

    def _begin(self, access: Access) -> None:
        digests, now = self.sequence.digests(access.blocks), access.at_s
        if self._told:
            self._match(access, digests)
        hit = self.pool.locate(digests)
        self._score(access, hit)
        self.pool.open_pin(access.request, OWNER, now)
        self._write(digests, hit, now)
        slots = self.pool.pin(access.request, digests, now)
        if self._rival is not None:
            self._rival.began(access, *_present(slots, access))
        self._publish(now)

    def _end(self, access: Access) -> None:
        digests, now = self.sequence.digests(access.blocks), access.at_s
        first = min(access.prompt_blocks, self.pool.locate(digests))
        if first == access.prompt_blocks:
            self._write(digests, first, now)
        self.pool.unpin(access.request)
        if self._rival is not None:
            self._rival.ended(access, *_present(self.pool.blocks.readable(digests), access))
        self._publish(now)
        if self._told:
            self._context(access, digests)
        self._known[access.blocks] = True
        self._leaves(access)
        self.figures.most_referenced = max(self.figures.most_referenced, self.pool.status().referenced_blocks)

    def _score(self, access: Access, hit: int) -> None:
        known = self._known[access.blocks]
        ideal = len(known) if known.all() else int(np.argmin(known))
        assert hit <= ideal, "a block is here that nobody wrote"
        self._known[access.blocks] = True
        if self.sequence.scored_s[0] <= access.at_s <= self.sequence.scored_s[1]:
            self.figures.prompt += len(access.blocks)
            self.figures.hit += hit
            self.figures.ideal += ideal
            self._sleepers(access, hit, ideal)

    def _sleepers(self, access: Access, hit: int, ideal: int) -> None:
        """A long wait is over: what is left of its context, and of contexts that others compacted meanwhile."""
        last = self._last.get(access.branch)
        if last is None or last.row.version != access.row.version:
            return
        if not SLEPT_S[0] <= access.at_s - last.at_s <= SLEPT_S[1]:
            return
        self.figures.slept_ideal += ideal
        self.figures.slept_hit += hit
        for at_s, blocks in self._left:
            if at_s > last.at_s:
                held = self.pool.blocks.readable(self.sequence.digests(blocks))
                self.figures.left += len(held)
                self.figures.left_kept += len(held) - held.count(None)

    def _leaves(self, access: Access) -> None:
        """Note what a compaction left."""
        last, self._last[access.branch] = self._last.get(access.branch), access
        if last is not None and last.row.version != access.row.version:
            gone = np.setdiff1d(last.blocks, access.blocks)
            self._left.append((access.at_s, gone))

    def _write(self, digests: bytes, first: int, now: float) -> None:
        """Write all blocks from `first` on that are not here."""
        at = first * DIGEST_BYTES
        if at >= len(digests):
            return
        request = AllocateRequest(digests=digests[at:], parent=digests[max(0, at - DIGEST_BYTES) : at])
        reply, _ = self.pool.allocate(request, OWNER, now, first)
        self.figures.refused += reply.refused
        written = [(*slot, DIGEST_BYTES, FINGERPRINT) for slot in reply.slots if slot is not None]
        self.pool.commit(CommitRequest(slots=written), OWNER, now)

    # what the directory hears and says

    def _match(self, access: Access, digests: bytes) -> None:
        row = access.row
        self.directory.match(
            MatchQuery(
                request=access.request,
                hashes=_keys(digests),
                branch=access.branch,
                version=row.version,
                parent=access.parent,
                kind=KINDS.get(row.op),
            ),
            access.at_s,
        )

    def _context(self, access: Access, digests: bytes) -> None:
        row, keys = access.row, _keys(digests)
        event = BranchEvent(
            id=f"{access.request}-context",
            t=access.at_s,
            branch=access.branch,
            type=BranchEventType.CONTEXT,
            source="router",
            request=access.request,
            parent=access.parent,
            kind=KINDS.get(row.op),
            version=row.version,
            tip=int.from_bytes(keys[-8:], "little") if keys else None,
            blocks=len(access.blocks),
            keys=keys,
            prompt_blocks=access.prompt_blocks,
            finish=access.finish,
            prefill_node=NODE,
            decode_node=NODE,
        )
        self._perform(self.directory.on_branch_event(event, access.at_s))
        if row.end:
            end = BranchEvent(
                id=f"{access.request}-end", t=access.at_s, branch=access.branch, type=BranchEventType.END, cascade=False
            )
            self._perform(self.directory.on_branch_event(end, access.at_s))

    def _publish(self, now: float) -> None:
        if not self._told:
            self.pool.log.take(WIRE_BYTES)
            return
        for message in self.pool.log.take(WIRE_BYTES):
            self._perform(self.directory.on_location(message, now))

    def _perform(self, effects: list[Effect]) -> None:
        while True:
            self._tell(effects)
            if not self.directory.has_work:
                return
            effects = self.directory.work(1000)

    def _tell(self, effects: list[Effect]) -> None:
        changes: list[ReferenceChange] = []
        values: list[ValueChange] = []
        for effect in effects:
            if isinstance(effect, ReferencesChanged):
                changes.append(
                    ReferenceChange(referenced=effect.referenced, unreachable=effect.unreachable, hashes=effect.keys)
                )
            elif isinstance(effect, ValuesChanged):
                self.figures.told_values += len(effect.keys) // 8
                if self._valued:
                    values.append(ValueChange(value=effect.value, referenced=effect.referenced, hashes=effect.keys))
        if changes or values:
            self._references += 1
            message = KvReference(node=NODE, incarnation=1, seq=self._references, changes=changes, values=values)
            for _ in self.pool.refer(message):
                pass


def _present(slots: list[int | None], access: Access) -> tuple[list[int], list[int]]:
    """The slots that are here, and when each block is read next."""
    here = [(slot, use) for slot, use in zip(slots, access.next_use.tolist(), strict=True) if slot is not None]
    return [slot for slot, _ in here], [use for _, use in here]


def _keys(digests: bytes) -> bytes:
    """The short keys of packed digests as the wire carries them."""
    return np.frombuffer(digests, ">u8")[:: DIGEST_BYTES // 8].astype("<u8").tobytes()


def _hello(blocks: int, block_size: int) -> NodeHello:
    return NodeHello(
        node=NODE,
        incarnation=1,
        engine_incarnation=1,
        model="trace",
        block_size=block_size,
        key_version="1",
        ranks=1,
        engine="trace",
        dtype="",
        capacities=Capacities(l1_tokens=0, l2_tokens=blocks * block_size),
        transfer="",
    )
