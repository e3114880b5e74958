"""Nodes of a directory's world: what a pool holds and has said, and which of that counts."""

from collections.abc import Iterable
from functools import reduce
from operator import xor

from directory_model import Context

from schemas.kv import KvLocation, Tier, TierTotal
from schemas.kv import keys_of as unpack
from services.directory.core.effects import ReferencesChanged

FIRST_INCARNATION = 1000


class Pool:
    """The truth of one node: what it holds, what it said, and the bits (referenced, unreachable) it was told."""

    def __init__(self) -> None:
        self.lives = 0
        self.restart()

    def restart(self, *, clock_back: bool = False) -> None:
        self.lives += 1
        self.incarnation = FIRST_INCARNATION - self.lives if clock_back else FIRST_INCARNATION + self.lives
        self.held: dict[Tier, dict[int, Context]] = {tier: {} for tier in Tier}
        self.bits: dict[int, tuple[bool, bool]] = {}
        self.seq = 0
        self.on_the_way: list[KvLocation] = []
        self.sent: list[KvLocation] = []

    def put(self, tier: Tier, piece: dict[int, Context]) -> None:
        new = piece.keys() - self.held[tier].keys()
        self.held[tier] |= piece
        if tier is Tier.L2:
            self.bits |= dict.fromkeys(new, (False, False))

    def total(self, tier: Tier) -> TierTotal:
        return TierTotal(blocks=len(self.held[tier]), digest=reduce(xor, self.held[tier], 0))

    def take(self, tier: Tier, keys: Iterable[int]) -> None:
        for key in keys:
            del self.held[tier][key]
            if tier is Tier.L2:
                del self.bits[key]

    def told(self, change: ReferencesChanged) -> None:
        if change.full:
            self.bits = dict.fromkeys(self.bits, (False, False))
        for key in unpack(change.keys).tolist():
            if key in self.bits:
                self.bits[key] = (change.referenced, change.unreachable)


class Feed:
    """Which messages of a node count, naively."""

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, incarnation: int) -> None:
        self.incarnation, self.seq, self.synced, self.silent = incarnation, 0, True, False
        self.waiting: dict[int, KvLocation] = {}

    def fall_silent(self) -> None:
        self.silent, self.synced = True, False

    def is_late(self, incarnation: int) -> bool:
        return incarnation < self.incarnation and not self.silent
