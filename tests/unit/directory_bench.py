"""A directory core with hands: what tests tell it, and what they read off it."""

import hashlib
from array import array
from functools import reduce
from operator import xor

from schemas.branch import BranchEvent, BranchEventType
from schemas.directory import MatchQuery, MatchReply
from schemas.kv import Capacities, ChangeType, KvLocation, LocationChange, NodeHello, SnapshotPart, Tier, TierTotal
from schemas.kv import keys_of as unpack
from schemas.phase import Phase, PhaseCommand
from services.directory.core.directory import Directory, DirectoryConfig
from services.directory.core.effects import Effect, NeedSnapshot, ReferencesChanged


def chain(*labels: str) -> list[int]:
    """Chained keys of the blocks of one context."""
    keys, digest = [], b""
    for label in labels:
        digest = hashlib.sha256(digest + label.encode()).digest()
        keys.append(int.from_bytes(digest[:8], "big"))
    return keys


def pack(keys: list[int]) -> bytes:
    return array("Q", keys).tobytes()


def stored(keys: list[int], parent: int | None = None, tier: Tier = Tier.L2) -> LocationChange:
    return LocationChange(type=ChangeType.STORED, tier=tier, parent=parent, hashes=pack(keys))


def removed(keys: list[int], tier: Tier = Tier.L2) -> LocationChange:
    return LocationChange(type=ChangeType.REMOVED, tier=tier, hashes=pack(keys))


class Bench:
    """A directory with hands: everything it asks for is kept, and checked after each step."""

    def __init__(self, **config: float) -> None:
        self.core = Directory(DirectoryConfig(**config), incarnation=1)  # type: ignore[arg-type]
        self.now = 0.0
        self.effects: list[Effect] = []
        self.events = 0

    def done(self, effects: list[Effect]) -> None:
        self.effects += effects
        while self.core.has_work:
            self.effects += self.core.work(10)
        self.core.check()

    def say(self, node: str, seq: int, *changes: LocationChange, incarnation: int = 1) -> None:
        message = KvLocation(node=node, incarnation=incarnation, seq=seq, changes=list(changes))
        self.done(self.core.on_location(message, self.now))

    def beat(self, node: str, seq: int, keys: list[int], incarnation: int = 1) -> None:
        """The heartbeat of a pool that holds these blocks in L2 and none in L1."""
        l1, l2 = TierTotal(blocks=0, digest=0), TierTotal(blocks=len(keys), digest=reduce(xor, keys, 0))
        message = KvLocation(node=node, incarnation=incarnation, seq=seq, changes=[], l1=l1, l2=l2)
        self.done(self.core.on_location(message, self.now))

    def hello(self, node: str, **fields: object) -> None:
        self.done(self.core.on_hello(hello(node, **fields), self.now))

    def snapshot(self, node: str, seq: int, *changes: LocationChange, incarnation: int = 1) -> None:
        part = SnapshotPart(node=node, incarnation=incarnation, seq=seq, snapshot="s", changes=list(changes))
        self.done(self.core.on_snapshot(part, self.now))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.done(self.core.tick(self.now))

    def tell(self, branch: str, type_: BranchEventType, **fields: object) -> BranchEvent:
        event = self.tell_now(branch, type_, **fields)
        self.done([])
        return event

    def tell_now(self, branch: str, type_: BranchEventType, **fields: object) -> BranchEvent:
        """An event whose put-off work is not done yet."""
        self.events += 1
        event = BranchEvent(**{"id": f"e{self.events}", "t": 0.0, "branch": branch, "type": type_} | fields)  # type: ignore[arg-type]
        self.effects += self.core.on_branch_event(event, self.now)
        return event

    def answered(
        self,
        branch: str,
        keys: list[int],
        prefill: str = "p1",
        decode: str | None = None,
        packed: bytes | None = None,
        settled: bool = True,
        **fields: object,
    ) -> BranchEvent:
        """A request of the branch was answered with this context."""
        given = {
            "source": "router",
            "tip": keys[-1],
            "blocks": len(keys),
            "keys": pack(keys) if packed is None else packed,
            "prompt_blocks": len(keys),
            "prefill_node": prefill,
            "decode_node": decode,
        }
        event = self.tell_now(branch, BranchEventType.CONTEXT, **given | fields)
        if settled:
            self.done([])
        return event

    def switch(self, node: str, phase: Phase, epoch: int) -> None:
        command = PhaseCommand(id="c", t=0.0, node=node, phase=phase, epoch=epoch, reason="", decision_id="")
        self.done(self.core.on_phase(command))

    def match(self, keys: list[int], **fields: object) -> MatchReply:
        query = MatchQuery(**{"request": "r", "hashes": pack(keys)} | fields)  # type: ignore[arg-type]
        return self.core.match(query, self.now)

    def held(self, node: str, tier: Tier = Tier.L2) -> int:
        return self.core.locations.nodes[node].holdings[tier].blocks

    def counts(self, node: str, keys: list[int]) -> list[int]:
        """The count of each copy on a node; blocks that it does not hold have none."""
        found = []
        for key in keys:
            place = self.core.tree.find(key)
            on_node = place is not None and any(
                holding.node == node
                and holding.live
                and any(a <= place[1] < b for a, b in zip(s[::2], s[1::2], strict=True))
                for holding, s in place[0].held.items()
            )
            found.append(sum(self.core.references.claims(*place, node).values()) if place and on_node else 0)
        return found

    def asked(self) -> list[str]:
        return [effect.node for effect in self.effects if isinstance(effect, NeedSnapshot)]

    def bits(self, node: str) -> dict[int, tuple[bool, bool]]:
        """(referenced, unreachable) as last said of each key to the pool of a node."""
        found: dict[int, tuple[bool, bool]] = {}
        for effect in self.effects:
            if isinstance(effect, ReferencesChanged) and effect.node == node:
                found |= dict.fromkeys(unpack(effect.keys).tolist(), (effect.referenced, effect.unreachable))
        return found


def hello(node: str, **fields: object) -> NodeHello:
    given = {
        "node": node,
        "incarnation": 1,
        "engine_incarnation": 1,
        "model": "m",
        "block_size": 16,
        "key_version": "k1",
        "ranks": 1,
        "engine": "timed",
        "dtype": "bf16",
        "capacities": Capacities(l1_tokens=1, l2_tokens=1),
        "transfer": "",
    }
    return NodeHello(**given | fields)  # type: ignore[arg-type]


B = chain(*"01234567")
