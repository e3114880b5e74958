"""The node's location log: every block that comes to or leaves either tier, numbered in one sequence.

The pool is the authority on both tiers of its node: L2 it knows itself, L1 the engine tells it. Whoever applies the
messages 1..seq of one incarnation to nothing knows exactly what the node holds as of seq.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from schemas.codec import RejectedMessage
from schemas.kv import (
    KEY_BYTES,
    SHA256_BYTES,
    BlockMedia,
    ChangeType,
    KvLocation,
    LocationChange,
    Tier,
    TierTotal,
    keys_of,
)

CHANGE_BYTES = 64
"""More than a change takes on the wire besides its keys and the media in its blocks."""
_MARK_BYTES = 16
MEDIA_KEPT = 1 << 17


@dataclass
class _Run:
    """A change in the making. Keys of a removed run are gathered from its end: `keys` is then in reverse order."""

    type: ChangeType
    tier: Tier
    parent: int | None
    keys: list[int]

    def pieces(self, limit_keys: int, media: Mapping[int, bytes]) -> Iterable[LocationChange]:
        """This run as changes of at most `limit_keys` keys; a removed run loses its end first."""
        keys = self.keys if self.type is ChangeType.STORED else self.keys[::-1]
        limit_keys = max(1, limit_keys * KEY_BYTES // bytes_per_block(media))
        starts = range(0, max(1, len(keys)), limit_keys)
        for start in starts if self.type is ChangeType.STORED else reversed(starts):
            parent = keys[start - 1] if start else self.parent
            yield change_of(self.type, self.tier, parent, keys[start : start + limit_keys], media)


def bytes_per_block(media: Mapping[int, bytes]) -> int:
    """What a block takes in a change, media included: in all but strange prompts at most one begins in it."""
    return KEY_BYTES + (_MARK_BYTES + 2 * SHA256_BYTES if media else 0)


def change_of(
    type_: ChangeType, tier: Tier, parent: int | None, keys: list[int], media: Mapping[int, bytes]
) -> LocationChange:
    """A change with its keys packed; `media` says which blocks that come hold media, by their keys."""
    marks: list[BlockMedia] = []
    if media and type_ is ChangeType.STORED:
        marks = [BlockMedia(number, media[key]) for number, key in enumerate(keys) if key in media]
    return LocationChange(type=type_, tier=tier, parent=parent, hashes=np.array(keys, "<u8").tobytes(), media=marks)


class LocationLog:
    """Collects changes and numbers the messages made of them; knows what the device tier holds, and which blocks the
    engine said to hold media: the `MEDIA_KEPT` it spoke of last."""

    def __init__(self, node: str, incarnation: int) -> None:
        self.node, self.incarnation = node, incarnation
        self.seq = 0
        self.l1: dict[int, int | None] = {}
        """Keys in device memory, each with the key of the block before it."""
        self.media: OrderedDict[int, bytes] = OrderedDict()
        self._noted: dict[int, bytes] = {}
        self._pending: list[_Run] = []
        self._totals: dict[Tier, tuple[int, int]] = dict.fromkeys(Tier, (0, 0))
        self._said = dict(self._totals)

    @property
    def pending(self) -> bool:
        """Whether there are changes that no message carries yet."""
        return bool(self._pending)

    def stored(self, tier: Tier, key: int, parent: int | None) -> None:
        """A block came to a tier; `parent` is the key of the block it extends, None at the start of a context."""
        blocks, digest = self._totals[tier]
        self._totals[tier] = blocks + 1, digest ^ key
        run = self._pending[-1] if self._pending else None
        if run is not None and run.type is ChangeType.STORED and run.tier is tier and run.keys[-1] == parent:
            run.keys.append(key)
        else:
            self._pending.append(_Run(ChangeType.STORED, tier, parent, [key]))

    def removed(self, tier: Tier, key: int, parent: int | None) -> None:
        """A block left a tier."""
        blocks, digest = self._totals[tier]
        self._totals[tier] = blocks - 1, digest ^ key
        run = self._pending[-1] if self._pending else None
        if run is not None and run.type is ChangeType.REMOVED and run.tier is tier and run.parent == key:
            run.keys.append(key)
            run.parent = parent
        else:
            self._pending.append(_Run(ChangeType.REMOVED, tier, parent, [key]))

    def note_media(self, keys: Sequence[int], marks: Iterable[BlockMedia]) -> None:
        """Blocks of a run with these keys hold media."""
        for mark in marks:
            if mark.block < len(keys):
                key = keys[mark.block]
                if self.media.get(key) != mark.sha256:
                    self.media[key] = self._noted[key] = mark.sha256
                self.media.move_to_end(key)
        while len(self.media) > MEDIA_KEPT:
            self.media.popitem(last=False)

    def take_noted(self) -> dict[int, bytes]:
        """What is said of media now and was not when this was taken last, by the key of the block."""
        noted, self._noted = self._noted, {}
        return noted

    def adopt_media(self, found: Iterable[tuple[int, bytes]]) -> None:
        """What a former life was told of the media in its blocks."""
        self.media.update(islice(found, MEDIA_KEPT))

    def device(self, changes: Iterable[LocationChange]) -> None:
        """Apply what the engine says of device memory. RejectedMessage, and nothing applied, for the other tier."""
        changes = list(changes)
        for change in changes:
            if Tier.L1 not in (change.tier, change.origin):
                raise RejectedMessage(
                    "schema", f"device change of tier {change.tier.value!r}: only 'l1' is the engine's"
                )
        for change in changes:
            self._device_change(change)

    def _device_change(self, change: LocationChange) -> None:
        if change.type is ChangeType.CLEARED:
            self.clear_device()
            return
        keys: list[int] = keys_of(change.hashes).tolist()
        parents = [change.parent, *keys[:-1]]
        self.note_media(keys, change.media)
        if change.type is ChangeType.STORED or (change.type is ChangeType.MOVED and change.tier is Tier.L1):
            for key, parent in zip(keys, parents, strict=True):
                if key not in self.l1:
                    self.l1[key] = parent
                    self.stored(Tier.L1, key, parent)
            return
        for key in reversed(keys):  # also `moved` out of l1: where it went to the pool reports itself
            if key in self.l1:
                self.removed(Tier.L1, key, self.l1.pop(key))

    def clear_device(self) -> None:
        """Device memory is empty, or its engine is gone."""
        if self.l1:
            self.l1.clear()
            self._totals[Tier.L1] = 0, 0
            self._pending.append(_Run(ChangeType.CLEARED, Tier.L1, None, []))

    def take(self, limit_bytes: int) -> list[KvLocation]:
        """The pending changes as numbered messages of at most `limit_bytes` each."""
        limit_keys = max(1, (limit_bytes - 4 * CHANGE_BYTES) // KEY_BYTES)
        messages: list[KvLocation] = []
        batch: list[LocationChange] = []
        size = 0
        for run in self._pending:
            for change in run.pieces(limit_keys, self.media):
                more = CHANGE_BYTES + len(change.hashes) // KEY_BYTES * bytes_per_block(self.media)
                if batch and size + more > limit_bytes - 2 * CHANGE_BYTES:
                    messages.append(self._numbered(batch))
                    batch, size = [], 0
                batch.append(change)
                size += more
        if batch:
            messages.append(self._numbered(batch))
        self._pending = []
        self._said = dict(self._totals)
        return messages

    def _numbered(self, changes: list[LocationChange]) -> KvLocation:
        self.seq += 1
        return KvLocation(node=self.node, incarnation=self.incarnation, seq=self.seq, changes=changes)

    def heartbeat(self) -> KvLocation:
        """A message without changes that repeats the last number, with what the tiers hold as of it."""
        l1, l2 = (
            TierTotal(blocks=blocks, digest=digest) for blocks, digest in (self._said[Tier.L1], self._said[Tier.L2])
        )
        return KvLocation(node=self.node, incarnation=self.incarnation, seq=self.seq, changes=[], l1=l1, l2=l2)

    def check(self) -> None:
        """Runs of removals and stores have keys; the total of the device tier is what it holds."""
        assert self._totals[Tier.L1][0] == len(self.l1)
        assert all(run.keys or run.type is ChangeType.CLEARED for run in self._pending)
