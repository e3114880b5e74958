"""The checkpoint on disk: written whole or not at all, now and then and at the end."""

import asyncio
import os
import time
from pathlib import Path

from structlog.typing import FilteringBoundLogger

from schemas.codec import RejectedMessage, encode
from services.clock import Clock
from services.directory.core.checkpoint import CHECKPOINT, Checkpoint, restore, save
from services.directory.core.directory import Directory
from services.directory.metrics import DirectoryMetrics


def read(path: Path) -> Checkpoint | None:
    """The checkpoint at `path`, None when there is none. RejectedMessage when it is not one, OSError as it comes."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    return CHECKPOINT.decode(data)


def write(path: Path, checkpoint: Checkpoint) -> int:
    """Replace the checkpoint at `path` by renaming a complete one over it; its size in bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data, new = encode(checkpoint), path.with_suffix(".new")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return len(data)


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
            checkpoint = await asyncio.to_thread(read, self._path)
        except RejectedMessage as error:
            self._log.error("checkpoint_unreadable", path=str(self._path), error=str(error))
            return 0
        if checkpoint is None:
            return 0
        restore(self._core, checkpoint, self._clock.now(), self._clock.wall())
        self._log.info("restored", sequence=checkpoint.sequence, branches=len(checkpoint.branches))
        return checkpoint.sequence

    async def save(self, sequence: int) -> None:
        """Write the state as of stream message `sequence`. A blind core's would be worse than the last one."""
        if self._path is None or self._core.blind:
            return
        async with self._one_at_a_time:
            began = time.perf_counter()
            checkpoint = save(self._core, sequence, self._clock.now(), self._clock.wall())
            try:
                self._metrics.checkpoint_bytes.set(await asyncio.to_thread(write, self._path, checkpoint))
            except OSError as error:
                self._metrics.checkpoint_failures.inc()
                self._log.error("checkpoint_not_written", path=str(self._path), error=str(error))
            self._metrics.checkpoint_seconds.set(time.perf_counter() - began)
