"""The directory's core, as its service uses it."""

from collections import Counter
from collections.abc import Sequence

from bench.directory_load import Keys, Stored
from schemas.branch import BranchEvent, BranchEventType
from schemas.codec import encode
from schemas.directory import MatchQuery, MatchReply, NodeMatch
from schemas.kv import KV_LOCATION, ChangeType, KvLocation, LocationChange, Tier
from services.directory.core.directory import Directory, DirectoryConfig

LOT_MESSAGES = 64
"""The service takes so many at once when they queue."""
REMEMBER_BLOCKS = 16_384
"""Keys kept of blocks that lie nowhere: a setting, lowered here so that what it may keep is full before churn is
measured."""


class Ours:
    """Events as MessagePack bytes, a context as packed keys of a request of a known branch."""

    def __init__(self, nodes: int) -> None:
        self._core = Directory(DirectoryConfig(remember_blocks=REMEMBER_BLOCKS), incarnation=1)
        self._sequences: Counter[int] = Counter()

    def stored(self, stored: Stored) -> bytes:
        change = LocationChange(
            type=ChangeType.STORED, tier=Tier.L2, parent=stored.parent, hashes=stored.keys.tobytes()
        )
        return self._message(stored.node, change)

    def removed(self, stored: Stored) -> bytes:
        change = LocationChange(type=ChangeType.REMOVED, tier=Tier.L2, hashes=stored.keys.tobytes())
        return self._message(stored.node, change)

    def apply(self, messages: Sequence[bytes], at_once: int | None = None) -> None:
        core, at_once = self._core, at_once or LOT_MESSAGES
        for start in range(0, len(messages), at_once):
            core.on_locations([KV_LOCATION.decode(data) for data in messages[start : start + at_once]], 0.0)
            while core.has_work:
                core.work(16)

    def question(self, number: int, keys: Keys) -> tuple[str, str, bytes]:
        return f"r{number}", f"{keys[-1]:x}", keys.tobytes()

    def ask(self, question: tuple[str, str, bytes]) -> list[NodeMatch]:
        """Where the prefix lies, node by node and in pieces: what the peer answers, and the join of all nodes."""
        return self._core.placement(question[2])[0]

    def match(self, question: tuple[str, str, bytes]) -> MatchReply:
        """All that a request needs: also its lineage, its branch's lease, and who else computes the same."""
        request, branch, keys = question
        return self._core.match(MatchQuery(request=request, branch=branch, hashes=keys), 1.0)

    def after(self, question: tuple[str, str, bytes]) -> None:
        """The request is answered: it is pending no more."""
        self._core.match(MatchQuery(request=question[0], release=True), 1.0)

    def found(self, answer: list[NodeMatch]) -> int:
        return max(match.l2_blocks for match in answer)

    def settle(self, contexts: list[Keys]) -> None:
        """Every context belongs to an active branch."""
        for number, keys in enumerate(contexts):
            event = BranchEvent(
                id=f"e{number}",
                t=0.0,
                branch=f"{keys[-1]:x}",
                type=BranchEventType.CONTEXT,
                source="router",
                version=0,
                tip=int(keys[-1]),
                blocks=len(keys),
                prompt_blocks=len(keys),
                prefill_node="n0",
                decode_node="n1",
            )
            self._core.on_branch_event(event, 0.0)
        assert self._core.stats().active_branches == len(contexts)

    def _message(self, node: int, change: LocationChange) -> bytes:
        self._sequences[node] += 1
        message = KvLocation(node=f"n{node}", incarnation=1, seq=self._sequences[node], changes=[change])
        return encode(message)
