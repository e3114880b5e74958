"""Which media the blocks of this node hold, for its location messages: learned from the prompts that come here."""

from collections import OrderedDict
from collections.abc import Iterable

from schemas.kv import BlockMedia, ChangeType, LocationChange, keys_of

KEPT = 1 << 16
"""Blocks with media of which it is remembered what they show; a block forgotten is one that no picture matches."""


class MediaMarks:
    """The sha256 of every medium in a block, by the block's short key."""

    def __init__(self) -> None:
        self._of: OrderedDict[int, bytes] = OrderedDict()

    def note(self, marks: Iterable[tuple[int, bytes]]) -> None:
        """Blocks with these keys hold these media."""
        for key, sha256 in marks:
            self._of[key] = sha256
            self._of.move_to_end(key)
        while len(self._of) > KEPT:
            self._of.popitem(last=False)

    def of(self, keys: Iterable[int]) -> list[BlockMedia]:
        """The media among blocks with these keys, in order."""
        if not self._of:
            return []
        return [BlockMedia(number, self._of[key]) for number, key in enumerate(keys) if key in self._of]

    def marked(self, change: LocationChange) -> LocationChange:
        """A change that says which of its blocks hold media."""
        if not self._of or change.type not in (ChangeType.STORED, ChangeType.MOVED):
            return change
        media = self.of(keys_of(change.hashes).tolist())
        if not media:
            return change
        return LocationChange(
            type=change.type,
            tier=change.tier,
            hashes=change.hashes,
            parent=change.parent,
            origin=change.origin,
            media=media,
        )
