"""One node as the directory knows it: its feed, its holdings, and the repair that is under way."""

from __future__ import annotations

from schemas.kv import KEY_BYTES, LocationChange, NodeHello, Tier
from services.directory.core.node_feed import NodeFeed
from services.directory.core.run import Holding, Run

FIRST_RETRY_S = 0.5
LONGEST_RETRY_S = 10.0
COMPARED = ("model", "block_size", "key_version", "dtype")


class Staged:
    """A snapshot being loaded, out of sight until its last part is in."""

    def __init__(self, node: str, ident: str, incarnation: int, seq: int) -> None:
        self.ident = ident
        self.incarnation = incarnation
        self.seq = seq
        self.holdings = {tier: Holding(node, tier, live=False) for tier in Tier}


class Joined:
    """Runs that `node` stored one behind the other: `change` is the first of them, `parts` are the keys of all."""

    __slots__ = ("change", "node", "parts")

    def __init__(self, node: Node, change: LocationChange) -> None:
        self.node = node
        self.change = change
        self.parts = [change.hashes]

    def goes_on(self, node: Node, change: LocationChange) -> bool:
        """Take `change` in if it begins where these end."""
        first = self.change
        follows = (
            node is self.node
            and change.type is first.type
            and change.tier is first.tier
            and change.origin is first.origin
            and not change.media
            and change.parent == int.from_bytes(self.parts[-1][-KEY_BYTES:], "little")
        )
        if follows and change.hashes:
            self.parts.append(change.hashes)
        return follows


class Node:
    """`asked`: a snapshot is under way, the `asks`th; a failed one is asked again at `retry_at`. `suspects`: orphans
    out of its live events, whose parents may be in messages we lost. `refused`: why the node is none of ours, or ""."""

    def __init__(self, name: str, buffer_messages: int, now: float) -> None:
        self.name = name
        self.feed = NodeFeed(buffer_messages)
        self.holdings = {tier: Holding(name, tier, live=True) for tier in Tier}
        self.staged: Staged | None = None
        self.asked = False
        self.asks = 0
        self.retry_at: float | None = None
        self.heard = now
        self.lost = False
        self.refused = ""
        self.hello: NodeHello | None = None
        self.suspects: dict[Run, float] = {}
        self.suspects_asked_at: float | None = None
        self.drift_asked_at: float | None = None
        self._backoff_s = FIRST_RETRY_S

    @property
    def present(self) -> bool:
        return not self.lost and not self.refused

    @property
    def synced(self) -> bool:
        """Whether what we know of the node is complete."""
        return self.feed.incarnation is not None and self.feed.synced and not self.asked

    def failed(self, now: float) -> None:
        """A snapshot did not come: wait longer each time before the next."""
        self.asked, self.staged = False, None
        self.retry_at = now + self._backoff_s
        self._backoff_s = min(LONGEST_RETRY_S, 2 * self._backoff_s)

    def repaired(self) -> None:
        self.asked, self.staged, self.retry_at = False, None, None
        self.suspects.clear()
        self._backoff_s = FIRST_RETRY_S


def mismatch(hello: NodeHello, expected: NodeHello) -> str:
    """What makes a node another cluster's, with both values; "" when nothing does."""
    differing = [name for name in COMPARED if getattr(hello, name) != getattr(expected, name)]
    return "; ".join(
        f"{name} of {hello.node} is {getattr(hello, name)!r}, of this cluster {getattr(expected, name)!r}"
        for name in differing
    )
