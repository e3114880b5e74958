"""Which media blocks hold: keys carry 30 bits of a medium's hash, too few to trust, so its whole sha256 is compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from schemas.kv import BlockMedia
from services.directory.core.journal import Journal
from services.directory.core.run import Keys


class Media:
    """The sha256 of every medium in a block, by the block's short key; blocks of text alone have no entry.

    The first report of a key counts: whoever has another picture under the same key neither holds nor finds it.
    """

    def __init__(self, journal: Journal) -> None:
        self.of: dict[int, bytes] = {}
        self._journal = journal

    def agreeing(self, keys: Keys, marks: Sequence[BlockMedia], held: Callable[[int], bool]) -> int:
        """How many leading blocks may hold what `marks` say of them: the first that is known with other media, or is
        `held` and known with none, ends them."""
        for mark in sorted(marks, key=lambda mark: mark.block):
            if mark.block < len(keys):
                key = keys[mark.block]
                noted = self.of.get(key)
                if noted != mark.sha256 and (noted is not None or held(key)):
                    return mark.block
        return len(keys)

    def note(self, keys: Keys, marks: Sequence[BlockMedia]) -> None:
        """These blocks are known from now on, with these media."""
        for mark in marks:
            if mark.block < len(keys):
                key = keys[mark.block]
                noted = self.of.setdefault(key, mark.sha256)
                if self._journal.open:
                    self._journal.media.append((key, noted))

    def forget(self, keys: Keys) -> None:
        """These blocks are not known any more."""
        if self.of:
            for key in keys:
                self.of.pop(key, None)
