"""Device memory of the timed engine: which blocks it holds, which of them are in use, which go first."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from schemas.block_key import pack_keys, short_key
from schemas.kv import ChangeType, LocationChange, Tier


@dataclass(slots=True)
class _Block:
    users: int
    parent: bytes
    by_prefill: bool


class DeviceCache:
    """`capacity` blocks: private ones (being filled for one leg) and shared ones, found by digest.

    Shared blocks nobody uses stay until room is needed, least recently used first, of one leg the deepest first, so
    that what is left of a context is always a prefix. locked + idle + private <= capacity.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.private = 0
        self._blocks: dict[bytes, _Block] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._changes: list[LocationChange] = []

    @property
    def free_blocks(self) -> int:
        """Blocks a new leg could take: idle ones give way."""
        return self.capacity - self.private - (len(self._blocks) - len(self._idle))

    @property
    def used_blocks(self) -> int:
        return self.private + len(self._blocks)

    def hits(self, digests: Sequence[bytes]) -> int:
        """How many leading blocks are here."""
        return next((i for i, digest in enumerate(digests) if digest not in self._blocks), len(digests))

    def lock(self, digests: Iterable[bytes]) -> None:
        """Use blocks that are here; they stay until `unlock`."""
        for digest in digests:
            block = self._blocks[digest]
            block.users += 1
            self._idle.pop(digest, None)

    def unlock(self, digests: Sequence[bytes]) -> None:
        """End the use of blocks, given in the order of their context."""
        for digest in reversed(digests):
            block = self._blocks[digest]
            block.users -= 1
            assert block.users >= 0, digest.hex()
            if block.users == 0:
                self._idle[digest] = None

    def take(self, count: int) -> None:
        """Take private blocks, in place of idle ones where needed. The caller has looked at `free_blocks`."""
        assert 0 <= count <= self.free_blocks, f"{count} blocks wanted, {self.free_blocks} free"
        self._evict(self.used_blocks + count - self.capacity)
        self.private += count

    def give(self, count: int) -> None:
        """Give private blocks back."""
        assert 0 <= count <= self.private, f"{count} blocks given back of {self.private}"
        self.private -= count

    def publish(self, digests: Sequence[bytes], parent: bytes, *, by_prefill: bool) -> None:
        """Private blocks of one leg are full now: shared and locked. `parent`: the digest before them, b"" for none.

        Where somebody else has published the same block, that one is used and the private one is free.
        """
        self.give(len(digests))
        fresh: list[bytes] = []
        before = parent
        for digest in digests:
            block = self._blocks.get(digest)
            if block is None:
                self._blocks[digest] = _Block(1, before, by_prefill)
                fresh.append(digest)
            else:
                self._note_stored(fresh)
                fresh = []
                block.by_prefill |= by_prefill
                self.lock((digest,))
            before = digest
        self._note_stored(fresh)

    def drop_unless_prefill(self) -> None:
        """Free the idle blocks that no prefill has used."""
        victims = [digest for digest in self._idle if not self._blocks[digest].by_prefill]
        self._remove(victims)

    def used_by_prefill(self, digests: Iterable[bytes]) -> None:
        """A prefill leg uses these blocks."""
        for digest in digests:
            self._blocks[digest].by_prefill = True

    def changes(self) -> list[LocationChange]:
        """What has come and gone since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def check(self) -> None:
        idle = {digest for digest, block in self._blocks.items() if block.users == 0}
        assert idle == set(self._idle), "idle blocks are those without users"
        assert self.private >= 0
        assert self.used_blocks <= self.capacity, f"{self.used_blocks} blocks of {self.capacity}"

    def _evict(self, count: int) -> None:
        if count > 0:
            self._remove([digest for digest, _ in zip(self._idle, range(count), strict=False)])

    def _remove(self, victims: Sequence[bytes]) -> None:
        run: list[bytes] = []
        for digest in victims:
            if run and self._blocks[run[-1]].parent != digest:
                self._note_removed(run)
                run = []
            run.append(digest)
        self._note_removed(run)
        for digest in victims:
            del self._blocks[digest], self._idle[digest]

    def _note_stored(self, run: Sequence[bytes]) -> None:
        if run:
            self._changes.append(self._change(ChangeType.STORED, run))

    def _note_removed(self, run: Sequence[bytes]) -> None:
        if run:
            self._changes.append(self._change(ChangeType.REMOVED, run[::-1]))

    def _change(self, kind: ChangeType, run: Sequence[bytes]) -> LocationChange:
        parent = self._blocks[run[0]].parent
        return LocationChange(
            type=kind, tier=Tier.L1, hashes=pack_keys(run), parent=short_key(parent) if parent else None
        )
