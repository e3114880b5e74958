"""The checkpoint on disk: written whole or not at all, now and then and at the end, between turns of the loop."""

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from structlog.typing import FilteringBoundLogger

from schemas.codec import RejectedMessage, encode
from services.clock import Clock
from services.directory.core.checkpoint import PART, Part, Saving, restore
from services.directory.core.directory import Directory
from services.directory.helpings import helping_saved, helpings_of
from services.directory.metrics import DirectoryMetrics

LENGTH_BYTES = 4


def read(path: Path) -> list[Part]:
    """The checkpoint at `path`, [] when there is none; what a killed directory left unfinished beside it goes.
    RejectedMessage when it is not a whole one, OSError as it comes."""
    for unfinished in path.parent.glob(f"{path.name}.*.new"):
        unfinished.unlink(missing_ok=True)
    try:
        data = memoryview(path.read_bytes())
    except FileNotFoundError:
        return []
    parts = [PART.decode(bytes(part)) for part in _framed(data)]
    if not parts or [part.end is None for part in parts].index(False) != len(parts) - 1:
        raise RejectedMessage("bytes", f"checkpoint: {len(parts)} parts, the last of which is not the end")
    return parts


def frame(part: Part) -> bytes:
    """A part as it stands in the file."""
    data = encode(part)
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def _framed(data: memoryview) -> Iterator[memoryview]:
    at = 0
    while at < len(data):
        first = at + LENGTH_BYTES
        at = first + int.from_bytes(data[at:first], "little")
        if at > len(data):
            raise RejectedMessage("bytes", f"checkpoint: {len(data)} bytes, a part of it ends at {at}")
        yield data[first:at]


class NewFile:
    """A file that takes the place of `path` once it is whole. OSError as it comes."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._building = path, path.with_name(f"{path.name}.{os.getpid()}.new")
        self._file: BinaryIO = self._building.open("wb", buffering=0)
        self.size = 0

    def write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]
        self.size += len(data)

    def publish(self) -> None:
        """Everything is written."""
        os.fsync(self._file.fileno())
        self._building.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def close(self) -> None:
        """Leave nothing behind of one that was not published."""
        self._file.close()
        self._building.unlink(missing_ok=True)


class Checkpoints:
    """Keeps the state of a core in one file of `state_dir`; "" keeps nothing."""

    def __init__(
        self,
        state_dir: str,
        partition: str,
        core: Directory,
        clock: Clock,
        metrics: DirectoryMetrics,
        log: FilteringBoundLogger,
    ) -> None:
        self._path = Path(state_dir) / f"directory-{partition}.msgpack" if state_dir else None
        self._core, self._clock, self._metrics, self._log = core, clock, metrics, log
        self._one_at_a_time = asyncio.Lock()

    async def restore(self) -> int:
        """Bring the core to the last checkpoint; the stream sequence it is as of, 0 without one that can be read."""
        if self._path is None:
            return 0
        try:
            parts = await asyncio.to_thread(read, self._path)
        except RejectedMessage as error:
            self._log.error("checkpoint_unreadable", path=str(self._path), error=str(error))
            return 0
        end = parts[-1].end if parts else None
        if end is None:
            return 0
        for _ in helpings_of(restore(self._core, parts, self._clock.now(), self._clock.wall())):
            await asyncio.sleep(0)
        self._log.info("restored", sequence=end.sequence, branches=len(self._core.branches))
        return end.sequence

    async def save(self, sequence: Callable[[], int]) -> None:
        """Write the state as of the moment when all of it is taken, and of stream message `sequence` then. A blind
        core's would be worse than the last one."""
        if self._path is None or self._core.blind:
            return
        async with self._one_at_a_time:
            began = time.perf_counter()
            try:
                self._metrics.checkpoint_bytes.set(await self._write(self._path, sequence))
            except Exception as error:  # noqa: BLE001 - whatever it was, the last checkpoint stands and the service lives
                self._metrics.checkpoint_failures.inc()
                self._log.error(
                    "checkpoint_not_written", path=str(self._path), error=f"{type(error).__name__}: {error}"
                )
            self._metrics.checkpoint_seconds.set(time.perf_counter() - began)

    async def _write(self, path: Path, sequence: Callable[[], int]) -> int:
        file = await asyncio.to_thread(NewFile, path)
        saving = Saving(self._core)
        try:
            ended = False
            while not ended:
                part = helping_saved(saving, sequence(), self._clock.now(), self._clock.wall())
                ended = part.end is not None
                await asyncio.to_thread(file.write, frame(part))
            saving.close()
            await asyncio.to_thread(file.publish)
        finally:
            saving.close()
            await asyncio.to_thread(file.close)
        return file.size
