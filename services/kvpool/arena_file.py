"""The file of an arena: one pool at a time, whole or not there at all."""

import fcntl
import os
from pathlib import Path

import msgspec

from services.arena import ArenaError, ArenaLayout
from services.arena.layout import LIVE_OFFSET, PAGE, SEQUENCE_OFFSET


def open_file(path: Path, wanted: ArenaLayout, *, reset: bool) -> tuple[int, ArenaLayout, bool]:
    """The descriptor of the arena at `path`, what its page 0 says now, and whether it held one before. Page 0 says what
    `wanted` says, but never an incarnation at or below the one that was there.

    ArenaError if another pool uses the file, or if it is of another model, layout or size (with `reset` such a file
    is left to those who still map it, and a new one takes its place), or if there is not the memory for a new one.
    """
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return _create(path, wanted), wanted, False
    try:
        _lock(path, descriptor)
        try:
            found = _expect(path, descriptor, wanted)
        except ArenaError:
            if not reset:
                raise
            os.pwrite(descriptor, bytes(4), LIVE_OFFSET)
            fresh = _create(path, wanted)
            os.close(descriptor)
            return fresh, wanted, False
        incarnation = max(wanted.incarnation, found.incarnation + 1)
        layout = msgspec.structs.replace(wanted, incarnation=incarnation)
        os.pwrite(descriptor, layout.page()[:SEQUENCE_OFFSET], 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, layout, True


def _expect(path: Path, descriptor: int, wanted: ArenaLayout) -> ArenaLayout:
    found = ArenaLayout.parse(os.pread(descriptor, PAGE, 0), os.fstat(descriptor).st_size)
    if found.identity != wanted.identity:
        raise ArenaError(f"the arena at {path} holds blocks of {found.identity}; this pool is for {wanted.identity}")
    if found.slots != wanted.slots:
        raise ArenaError(f"the arena at {path} has {found.slots} slots; this pool is to have {wanted.slots}")
    return found


def _create(path: Path, wanted: ArenaLayout) -> int:
    """Make the file beside its place and move it there when it is whole."""
    building = path.with_name(path.name + ".new")
    try:
        descriptor = os.open(building, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ArenaError(f"no arena can be made at {path}: {error.strerror}") from error
    try:
        _lock(building, descriptor)
        os.ftruncate(descriptor, 0)
        try:
            os.posix_fallocate(descriptor, 0, wanted.total_bytes)
        except OSError as error:
            os.unlink(building)
            room = os.statvfs(path.parent)
            raise ArenaError(
                f"the arena at {path} takes {wanted.total_bytes} bytes, {room.f_bavail * room.f_frsize} are free: "
                f"{error.strerror}"
            ) from error
        os.pwrite(descriptor, wanted.page(), 0)
        os.rename(building, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _lock(path: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ArenaError(f"the arena at {path} is in use by another pool") from None
