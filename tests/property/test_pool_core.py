"""The pool's core against a naive model of it: every rule in words, no heap, no index, no links."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from pool_model import CONTEXTS, DIGESTS, PARENTS, Block, Hold, true_parents

from schemas.block_key import pack_keys, short_key
from schemas.kv import NEUTRAL, ChangeType, KvReference, LocationChange, ReferenceChange, Tier, ValueChange, keys_of
from schemas.pool import AllocateRequest, CommitRequest, LeaseRequest
from services.kvpool.core.blocks import AdoptedBlock, Effects
from services.kvpool.core.pool import PoolCore

SLOTS = 8
ASIDE_S = 5.0
PIN_TTL_S = 20.0
contexts = st.sampled_from(CONTEXTS)
owners = st.integers(1, 3)
ids = st.sampled_from(["a", "b", "c"])


class PoolAgainstModel(RuleBasedStateMachine):
    """`blocks` is what can be found, `doomed` what only its readers still see, `aside` what a lost writer may touch."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.core = PoolCore("n", 1, SLOTS, pin_ttl_s=PIN_TTL_S, aside_s=ASIDE_S)
        self.blocks: dict[bytes, Block] = {}
        self.holds: dict[tuple[str, str], Hold] = {}
        self.doomed: set[int] = set()
        self.aside: dict[int, tuple[int, float]] = {}
        self.device: dict[int, None] = {}
        self.arena: dict[int, tuple[int, bytes, bytes, bool]] = {}
        self.generations = [0] * SLOTS
        self.told: dict[Tier, set[int]] = {Tier.L1: set(), Tier.L2: set()}
        self.seq = 0
        self.reference_seq = 0

    # the arena as the shell would keep it

    def _perform(self, effects: Effects) -> None:
        for slot in effects.freed:
            del self.arena[slot]
        for slot, generation, digest, parent in effects.begun:
            assert slot not in self.arena, "a slot was given out that is in use"
            assert generation > self.generations[slot], "the generation did not rise"
            self.generations[slot] = generation
            self.arena[slot] = (generation, digest, parent, False)
        for slot, length, fingerprint in effects.committed:
            generation, digest, parent, _ = self.arena[slot]
            assert (length, fingerprint) == (7, digest[:16])
            self.arena[slot] = (generation, digest, parent, True)

    # the rules in words

    def _held(self, slot: int) -> bool:
        return any(slot in hold.slots for hold in self.holds.values())

    def _extended(self, digest: bytes) -> bool:
        return any(PARENTS[other] == digest for other in self.blocks)

    def _used_slots(self) -> set[int]:
        return {block.slot for block in self.blocks.values()} | self.doomed | set(self.aside)

    def _next_victim(self, guarded: set[bytes]) -> bytes | None:
        def order(digest: bytes) -> tuple[int, int, float, int, int]:
            block = self.blocks[digest]
            rank = 0 if block.unreachable else 2 if block.referenced else 1
            return rank, block.worth[block.referenced] if rank else 0, block.used_s, -block.depth, block.slot

        may_go = [
            digest
            for digest, block in self.blocks.items()
            if block.owner is None
            and digest not in guarded
            and not self._held(block.slot)
            and not self._extended(digest)
        ]
        return min(may_go, key=order, default=None)

    def _forget(self, digest: bytes) -> Block:
        block = self.blocks.pop(digest)
        parent = self.blocks.get(PARENTS[digest])
        if parent is not None:
            parent.used_s = max(parent.used_s, block.used_s)
        return block

    def _let_go(self, key: tuple[str, str]) -> None:
        self.holds.pop(key, None)
        self.doomed = {slot for slot in self.doomed if self._held(slot)}

    def _readable(self, digest: bytes) -> bool:
        return digest in self.blocks and self.blocks[digest].owner is None

    # rules

    @rule(context=contexts, first=st.integers(0, 3), count=st.integers(1, 7), owner=owners)
    def allocate(self, context: list[bytes], first: int, count: int, owner: int) -> None:
        digests = context[first : first + count]
        parent = context[first - 1] if first else b""
        request = AllocateRequest(digests=b"".join(digests), parent=parent)
        guarded = {digest for digest in [parent, *digests] if digest in self.blocks}
        for digest in guarded:
            self.blocks[digest].used_s = self.now
        missing = [digest for digest in digests if digest not in self.blocks]
        expected_freed = []
        while SLOTS - len(self._used_slots()) < len(missing):
            victim = self._next_victim(guarded)
            if victim is None:
                break
            expected_freed.append(self._forget(victim).slot)
        granted = missing[: SLOTS - len(self._used_slots())]

        reply, effects = self.core.allocate(request, owner, self.now, first)
        assert effects.freed == expected_freed
        assert reply.refused == len(missing) - len(granted)
        assert [d for d, slot in zip(digests, reply.slots, strict=True) if slot is not None] == granted
        self._perform(effects)
        for i, (digest, given) in enumerate(zip(digests, reply.slots, strict=True)):
            if given is not None:
                before = self.blocks.get(PARENTS[digest])
                depth = before.depth + 1 if before else first + i
                self.blocks[digest] = Block(*given, owner=owner, used_s=self.now, depth=depth)

    @rule(context=contexts, first=st.integers(0, 2), count=st.integers(1, 7), seconds=st.sampled_from([0.0, 0.1]))
    def write(self, context: list[bytes], first: int, count: int, seconds: float) -> None:
        self.now += seconds
        self.allocate(context, first, count, 4)
        self._commit(4, [digest for digest, block in self.blocks.items() if block.owner == 4])

    def _commit(self, owner: int, digests: list[bytes]) -> None:
        slots = [(self.blocks[d].slot, self.blocks[d].generation, 7, d[:16]) for d in digests]
        reply, effects = self.core.commit(CommitRequest(slots=slots), owner, self.now)
        assert reply.committed == len(digests)
        self._perform(effects)
        for digest in digests:
            self.blocks[digest].owner = None
            self.blocks[digest].used_s = self.now

    @rule(context=contexts, first=st.integers(0, 2), count=st.integers(1, 7), seconds=st.sampled_from([0.0, 0.1]))
    def write_too(self, context: list[bytes], first: int, count: int, seconds: float) -> None:
        self.write(context, first, count, seconds)

    @rule(owner=owners, data=st.data())
    def commit(self, owner: int, data: st.DataObject) -> None:
        mine = [d for d, b in self.blocks.items() if b.owner == owner]
        done = [d for d in mine if data.draw(st.booleans())]
        dropped = [d for d in mine if d not in done and data.draw(st.booleans())]
        stale = data.draw(st.sampled_from(["", "owner", "generation"]))
        slots = [(self.blocks[d].slot, self.blocks[d].generation, 7, d[:16]) for d in done]
        if stale == "generation":
            slots = [(slot, generation - 1, length, print_) for slot, generation, length, print_ in slots]
        abandon = [(self.blocks[d].slot, self.blocks[d].generation) for d in dropped]
        request = CommitRequest(slots=slots, abandon=abandon)
        reply, effects = self.core.commit(request, 9 if stale == "owner" else owner, self.now)
        self._perform(effects)
        assert reply.committed == (0 if stale else len(done))
        for digest in done if not stale else ():
            self.blocks[digest].owner = None
            self.blocks[digest].used_s = self.now
        for digest in dropped if stale != "owner" else ():
            self._forget(digest)

    @rule(context=contexts, count=st.integers(1, 7), id_=ids, ttl_s=st.sampled_from([1.0, 10.0]))
    def lease(self, context: list[bytes], count: int, id_: str, ttl_s: float) -> None:
        self._let_go(("lease", id_))
        infos = self.core.lease(LeaseRequest(id=id_, digests=b"".join(context[:count]), ttl_s=ttl_s), self.now)
        leading = []
        for digest in context[:count]:
            if not self._readable(digest):
                break
            leading.append(digest)
        assert [info.slot for info in infos] == [self.blocks[d].slot for d in leading]
        assert [info.fingerprint for info in infos] == [d[:16] for d in leading]
        hold = Hold(None, self.now + ttl_s)
        for digest in leading:
            hold.slots.add(self.blocks[digest].slot)
            self.blocks[digest].used_s = self.now
        self.holds["lease", id_] = hold

    @rule(context=contexts, count=st.integers(1, 7), id_=ids, owner=owners)
    def pin(self, context: list[bytes], count: int, id_: str, owner: int) -> None:
        self._let_go(("pin", id_))
        self.core.open_pin(id_, owner, self.now)
        found = self.core.pin(id_, b"".join(context[:count]), self.now)
        here = [self.blocks[d].slot if self._readable(d) else None for d in context[:count]]
        assert found == here
        hold = Hold(owner, self.now + PIN_TTL_S, {slot for slot in here if slot is not None})
        for digest in context[:count]:
            if self._readable(digest):
                self.blocks[digest].used_s = self.now
        self.holds["pin", id_] = hold

    @rule(id_=ids, keep=st.integers(0, 3))
    def keep_pinned(self, id_: str, keep: int) -> None:
        kept = sorted(self.holds["pin", id_].slots)[:keep] if ("pin", id_) in self.holds else []
        self.core.keep_pinned(id_, kept)
        if ("pin", id_) in self.holds:
            self.holds["pin", id_].slots = set(kept)
        self.doomed = {slot for slot in self.doomed if self._held(slot)}

    @rule(kind=st.sampled_from(["pin", "lease"]), id_=ids)
    def release(self, kind: str, id_: str) -> None:
        (self.core.unpin if kind == "pin" else self.core.end_lease)(id_)
        self._let_go((kind, id_))

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self._perform(self.core.tick(self.now))
        for key in [key for key, hold in self.holds.items() if hold.expires_s <= self.now]:
            self._let_go(key)
        self.aside = {slot: entry for slot, entry in self.aside.items() if entry[1] > self.now}

    @rule(owner=owners, ended=st.booleans())
    def connection_lost(self, owner: int, ended: bool) -> None:
        for key in [key for key, hold in self.holds.items() if hold.owner == owner]:
            self._let_go(key)
        until = self.now + ASIDE_S
        lost = [digest for digest, block in self.blocks.items() if block.owner == owner]
        self.core.drop_owner(owner, self.now)
        for digest in lost:
            self.aside[self._forget(digest).slot] = (owner, until)
        # what an earlier connection of this owner left waits as long again
        self.aside = {s: (o, until if o == owner else u) for s, (o, u) in self.aside.items()}
        if ended:
            self._perform(self.core.end_owner(owner, self.now))
            self.aside = {slot: entry for slot, entry in self.aside.items() if entry[0] != owner}

    @rule(digest=st.sampled_from(DIGESTS))
    def discard(self, digest: bytes) -> None:
        if not self._readable(digest):
            return
        block = self.blocks[digest]
        assert self.core.discard(block.slot, block.generation - 1) == Effects()
        self._perform(self.core.discard(block.slot, block.generation))
        self._forget(digest)
        if self._held(block.slot):
            self.doomed.add(block.slot)

    @rule(full=st.booleans(), data=st.data())
    def refer(self, full: bool, data: st.DataObject) -> None:
        changes = []
        if full:
            for block in self.blocks.values():
                block.referenced = block.unreachable = False
                block.worth = {True: NEUTRAL, False: NEUTRAL}
        for referenced in (True, False):
            for unreachable in (True, False):
                digests = data.draw(st.lists(st.sampled_from(DIGESTS), max_size=4, unique=True))
                hashes = pack_keys(digests)
                changes.append(ReferenceChange(referenced=referenced, unreachable=unreachable, hashes=hashes))
                for digest in digests:
                    if digest in self.blocks:
                        if self.blocks[digest].referenced != referenced:
                            self.blocks[digest].worth[not referenced] = NEUTRAL
                        self.blocks[digest].referenced = referenced
                        self.blocks[digest].unreachable = unreachable
        values = []
        for referenced in (True, False):
            digests = data.draw(st.lists(st.sampled_from(DIGESTS), max_size=6, unique=True))
            value = data.draw(st.sampled_from((0, 1, NEUTRAL, 200)))
            values.append(ValueChange(value=value, referenced=referenced, hashes=pack_keys(digests)))
            for digest in digests:
                if digest in self.blocks:
                    self.blocks[digest].worth[referenced] = value
        self.reference_seq += 1
        message = KvReference(
            node="n", incarnation=1, seq=self.reference_seq, full=full, changes=changes, values=values
        )
        for _ in self.core.refer(message):
            pass

    @rule(context=contexts, first=st.integers(0, 3), count=st.integers(1, 5), type_=st.sampled_from(ChangeType))
    def device_says(self, context: list[bytes], first: int, count: int, type_: ChangeType) -> None:
        digests = context[first : first + count]
        parent = short_key(context[first - 1]) if first else None
        tier = Tier.L2 if type_ is ChangeType.MOVED else Tier.L1
        origin = Tier.L1 if type_ is ChangeType.MOVED else None
        hashes = b"" if type_ is ChangeType.CLEARED else pack_keys(digests)
        self.core.device([LocationChange(type=type_, tier=tier, parent=parent, hashes=hashes, origin=origin)])
        for digest in digests:
            if type_ is ChangeType.STORED:
                self.device[short_key(digest)] = None
            else:
                self.device.pop(short_key(digest), None)
        if type_ is ChangeType.CLEARED:
            self.device.clear()

    @rule()
    def engine_lost(self) -> None:
        self.core.engine_lost()
        self.device.clear()

    @rule()
    def publish(self) -> None:
        for message in self.core.log.take(400):
            self.seq += 1
            assert message.seq == self.seq
            for change in message.changes:
                keys = set(keys_of(change.hashes).tolist())
                if change.type is ChangeType.CLEARED:
                    self.told[change.tier] = set()
                elif change.type is ChangeType.STORED:
                    assert true_parents(change)
                    assert not keys & self.told[change.tier], "stored twice"
                    self.told[change.tier] |= keys
                else:
                    assert true_parents(change)
                    assert keys <= self.told[change.tier], "removed what was not there"
                    self.told[change.tier] -= keys
        assert self.told[Tier.L1] == set(self.device)
        assert self.told[Tier.L2] == {short_key(d) for d in self.blocks if self._readable(d)}

    @rule(limit_blocks=st.integers(1, 5))
    def snapshot(self, limit_blocks: int) -> None:
        self.publish()
        snapshot = self.core.freeze("s")
        found: dict[Tier, set[int]] = {Tier.L1: set(), Tier.L2: set()}
        cursor: int | None = 0
        while cursor is not None:
            part = snapshot.part(cursor, limit_blocks, 4096)
            assert part is not None
            assert part == snapshot.part(cursor, limit_blocks, 4096), "an answer that was lost comes again"
            assert part.seq == self.seq
            for change in part.changes:
                keys = keys_of(change.hashes).tolist()
                assert true_parents(change)
                late = {short_key(d) for d in self.blocks if self._readable(d)} - found[Tier.L2]
                assert change.tier is Tier.L1 or change.parent not in late, "a block before the one it extends"
                assert not found[change.tier] & set(keys)
                found[change.tier] |= set(keys)
            cursor = part.next_cursor
        assert found == self.told

    @rule()
    def restart(self) -> None:
        self.publish()
        incarnation = self.core.log.incarnation + 1
        self.core = PoolCore("n", incarnation, SLOTS, pin_ttl_s=PIN_TTL_S, aside_s=ASIDE_S)
        blocks = [
            AdoptedBlock(slot, digest, parent, 7, digest[:16])
            for slot, (_, digest, parent, committed) in sorted(self.arena.items())
            if committed
        ]
        torn = [slot for slot, (*_, committed) in self.arena.items() if not committed]
        assert self.core.adopt(self.generations, blocks, torn, self.now) == Effects()
        self.blocks = {digest: block for digest, block in self.blocks.items() if block.owner is None}
        for block in self.blocks.values():
            block.used_s = self.now
            block.referenced = block.unreachable = False
            block.worth = {True: NEUTRAL, False: NEUTRAL}
        self._renew_depths()
        self.holds.clear()
        self.doomed.clear()
        self.aside = dict.fromkeys(torn, (0, self.now + ASIDE_S))
        self.device.clear()
        self.told = {Tier.L1: set(), Tier.L2: set()}
        self.seq = 0
        assert {info.slot for info in self.core.unverified(range(SLOTS))} == {block.slot for block in blocks}

    def _renew_depths(self) -> None:
        for digest, block in self.blocks.items():
            block.depth = 0
            at = PARENTS[digest]
            while at in self.blocks:
                block.depth += 1
                at = PARENTS[at]

    @invariant()
    def core_agrees(self) -> None:
        self.core.check()
        for context in CONTEXTS:
            leading = next((i for i, digest in enumerate(context) if not self._readable(digest)), len(context))
            assert self.core.locate(b"".join(context)) == leading
        status = self.core.status()
        assert status.used_blocks == len(self._used_slots())
        assert status.referenced_blocks == sum(block.referenced for block in self.blocks.values())
        assert status.pinned_blocks == len({slot for hold in self.holds.values() for slot in hold.slots})


PoolAgainstModel.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestPoolAgainstModel = PoolAgainstModel.TestCase
