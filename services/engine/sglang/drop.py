"""After a switch away from decode: free the device blocks that only decode used, writing first what no arena holds.

Blocks that a prefill request has put into the tree stay, and so does every block before them. The rest goes leaf by
leaf, over as many turns of the loop as its writes need; a block whose write failed once goes all the same.
"""

from collections import defaultdict
from typing import Any

_MARK = "ei_served_prefill"


def mark_prefill_path(node: Any) -> None:
    """A prefill request has used every block from the root to this tree node."""
    while node is not None:
        setattr(node, _MARK, True)
        node = node.parent


class DecodeCacheDropper:
    """Carries out one order at a time; `begin` again while it is active renews the order."""

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self._core = tree.tree_core
        self._tried: set[int] = set()
        self.active = False

    def begin(self) -> None:
        """Start to drop."""
        self.active = True
        self._tried.clear()

    def advance(self) -> None:
        """Drop or write the leaves that may go now; the order ends when there are none."""
        if not self.active:
            return
        leaves = self._decode_leaves()
        for node in leaves:
            if node.write_through_pending_id is None and not self._queue_write(node):
                self._tree._evict_device_leaf(node.id, defaultdict(int))
        self.active = bool(leaves)

    def _decode_leaves(self) -> list[Any]:
        """Nodes that only decode used, with nothing behind them on the device: written, unwritten or being written."""
        leaves: list[Any] = []
        stack = [self._core.root_node]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            writing = node.write_through_pending_id is not None
            if not getattr(node, _MARK, False) and (writing or self._core._is_device_leaf(node)):
                leaves.append(node)
        return leaves

    def _queue_write(self, node: Any) -> bool:
        if node.external_cache_stored or node.id in self._tried:
            return False
        self._tried.add(node.id)
        self._tree.linker.offload_nodes([node.id])
        return node.write_through_pending_id is not None
