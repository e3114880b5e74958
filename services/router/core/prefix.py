"""What of a prompt's cached prefix a node has itself, what it must fetch from peers, and from whom."""

from collections.abc import Callable

import msgspec

from schemas.directory import MatchReply, Piece
from schemas.serve import FetchSource


class Prefix(msgspec.Struct, frozen=True):
    """Blocks [0, device) in the node's own L1, [0, blocks) usable in all, of which `fetch` come from peers."""

    blocks: int
    device: int
    fetch: tuple[FetchSource, ...] = ()

    @property
    def fetched_blocks(self) -> int:
        return sum(source.last - source.first for source in self.fetch)


NOTHING = Prefix(0, 0)


def reusable_blocks(prompt_tokens: int, block_size: int) -> int:
    """The last prompt token is always computed: (n - 1) // block_size blocks at most."""
    return max(0, prompt_tokens - 1) // block_size


def shared_prefix(node: str, match: MatchReply, limit: int, usable: Callable[[str], bool]) -> Prefix:
    """The longest prefix `node` can have: its own blocks, continued by the L2 pieces of nodes that are `usable`.

    `limit` is the number of reusable blocks of the prompt.
    """
    device, own = _own_blocks(node, match, limit)
    end, fetch = own, list[FetchSource]()
    for piece in sorted(match.pieces, key=lambda piece: piece.first):
        last = min(piece.last, limit)
        if last <= end:
            continue
        source = _source(node, piece, usable)
        if piece.first > end or source is None:
            break
        if source != node:
            _extend(fetch, source, end, last)
        end = last
    return Prefix(end, device, tuple(fetch))


def local_prefix(node: str, match: MatchReply, limit: int) -> Prefix:
    """The prefix `node` has without any peer: its own L1, and its own L2 as far as it goes on from there."""
    whole = shared_prefix(node, match, limit, lambda name: name == node)
    return Prefix(whole.blocks, whole.device)


def _own_blocks(node: str, match: MatchReply, limit: int) -> tuple[int, int]:
    """(leading blocks in L1, leading blocks in any own tier); a pending prefix counts at the node computing it."""
    own = next((found for found in match.nodes if found.node == node), None)
    device = own.l1_blocks if own else 0
    if match.pending_node == node:
        device = max(device, match.pending_blocks)
    device = min(device, limit)
    return device, max(device, min(own.l2_blocks if own else 0, limit))


def _source(node: str, piece: Piece, usable: Callable[[str], bool]) -> str | None:
    if node in piece.nodes:
        return node
    return next((name for name in piece.nodes if usable(name)), None)


def _extend(fetch: list[FetchSource], node: str, first: int, last: int) -> None:
    if fetch and fetch[-1].node == node and fetch[-1].last == first:
        first = fetch.pop().first
    fetch.append(FetchSource(node=node, first=first, last=last))
