"""Checkpoints of a directory's core, taken in pieces or at once, by way of the bytes on disk."""

from collections.abc import Iterable

from schemas.kv import keys_of as unpack
from services.directory.checkpoints import frame
from services.directory.core.checkpoint import PART, Part, SavedBranch, Saving, restore
from services.directory.core.directory import Directory


def through_disk(part: Part) -> Part:
    """A part as it is read again."""
    return PART.decode(frame(part)[4:])


def taken(directory: Directory, now: float = 0.0, wall: float = 0.0) -> list[Part]:
    """All of it at once."""
    return rest_of(Saving(directory), now, wall)


def rest_of(saving: Saving, now: float = 0.0, wall: float = 0.0) -> list[Part]:
    """What is left of a checkpoint begun before, as of now."""
    while saving.step():
        pass
    part = through_disk(saving.end(0, now, wall))
    saving.close()
    return [part]


def put_back(directory: Directory, parts: Iterable[Part], now: float = 0.0, wall: float = 0.0) -> None:
    """All of it into a new directory."""
    for _ in restore(directory, parts, now, wall):
        pass


def said(parts: list[Part]) -> dict[tuple[str, str], SavedBranch]:
    """The last word of a checkpoint on each branch."""
    return {(branch.tenant, branch.id): branch for part in parts for branch in part.branches}


def links(parts: list[Part]) -> set[tuple[int | None, int]]:
    """Every block of a checkpoint with the one before it."""
    chains = [(chain.parent, unpack(chain.keys).tolist()) for part in parts for chain in part.chains]
    return {pair for before, keys in chains for pair in zip([before, *keys], keys, strict=False)}
