"""Where each branch was served last: all the router has to go by when the directory keeps silent."""

from collections import OrderedDict
from dataclasses import dataclass

from schemas.directory import MatchReply, NodeMatch, Piece
from services.router.core.context import Context
from services.router.core.effects import StoreContext


@dataclass(frozen=True, slots=True)
class Served:
    """A branch's last context: the tip of its blocks, the prompt's share of them, and who computed which."""

    tip: int | None
    blocks: int
    prompt_blocks: int
    prefill_node: str
    decode_node: str
    version: int | None


class BranchMemory:
    """The last `capacity` branches by (tenant, branch)."""

    def __init__(self, capacity: int = 20_000) -> None:
        self.capacity = capacity
        self._served: OrderedDict[tuple[str, str], Served] = OrderedDict()

    def store(self, stored: StoreContext) -> None:
        """Remember where a branch's answer was computed."""
        key = (stored.tenant, stored.branch)
        self._served[key] = Served(
            stored.tip, stored.blocks, stored.prompt_blocks, stored.prefill_node, stored.decode_node, stored.version
        )
        self._served.move_to_end(key)
        if len(self._served) > self.capacity:
            self._served.popitem(last=False)

    def knows(self, tenant: str, branch: str) -> bool:
        """Whether a request of the branch was answered here."""
        return (tenant, branch) in self._served

    def recall(self, tenant: str, branch: str | None, context: Context) -> MatchReply:
        """A guess for the directory's answer: the branch's last nodes have its last context, if this one extends it."""
        served = self._served.get((tenant, branch)) if branch else None
        if served is None:
            return MatchReply(blocks=0, blind=True)
        extends = 0 < served.blocks <= len(context.digests) and context.key(served.blocks - 1) == served.tip
        if not extends:
            return MatchReply(blocks=0, blind=True, version=served.version)
        split = min(served.prompt_blocks, served.blocks)
        return MatchReply(
            blocks=served.blocks,
            nodes=[NodeMatch(node=served.prefill_node, l1_blocks=0, l2_blocks=split)],
            pieces=[
                Piece(first=0, last=split, nodes=[served.prefill_node]),
                Piece(first=split, last=served.blocks, nodes=[served.decode_node]),
            ],
            version=served.version,
            last_prefill_node=served.prefill_node,
            last_decode_node=served.decode_node,
            blind=True,
        )

    def check(self) -> None:
        assert len(self._served) <= self.capacity
