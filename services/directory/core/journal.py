"""What changes while a checkpoint is taken in pieces, so that it can be taken again."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.directory.core.branch import Branch

Chain = tuple[int | None, bytes]
"""The key of the block before, None at the start of a context, and the packed keys of blocks that follow it."""


class Journal:
    """Notes only while it is `open`: `chains` that came to the tree, `media` by the key of their block, and `branches`
    that are not as they were."""

    def __init__(self) -> None:
        self.open = False
        self.chains: deque[Chain] = deque()
        self.media: list[tuple[int, bytes]] = []
        self.branches: OrderedDict[Branch, None] = OrderedDict()

    def begin(self) -> None:
        """Note what changes from now on. RuntimeError while another checkpoint is taken."""
        if self.open:
            raise RuntimeError("a checkpoint is being taken already")
        self.open = True

    def changed(self, branch: Branch) -> None:
        """Something that a checkpoint says of this branch changed."""
        if self.open:
            self.branches[branch] = None

    def end(self) -> None:
        """Note nothing more, and forget what was noted."""
        self.open = False
        self.chains.clear()
        self.media.clear()
        self.branches.clear()
