"""The thread that submits Mooncake transfers, watches them end, and checks what arrived."""

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from services.kvpool.arena import Arena
from services.kvpool.transfer.types import CopyJob, Outcome

IN_FLIGHT = 32
"""Entries of one copy under way at a time: enough to fill a link, far below what jams a peer."""
MERGED_BYTES = 1 << 20
"""Small blocks that follow one another on both sides become one entry of at most this size."""
POLL_S = 0.0002
SLOW_POLL_S = 0.01
_RUNNING, _ARRIVED, _TIMED_OUT = 0, 1, -2


class TransferEngine(Protocol):
    """What we use of Mooncake's engine."""

    def batch_transfer_async_read(
        self, session: str, buffers: list[int], peer_addresses: list[int], lengths: list[int]
    ) -> int: ...

    def transfer_check_status(self, batch: int) -> int: ...


@dataclass(frozen=True)
class _Entry:
    """Blocks [first, last) of a copy, contiguous on both sides."""

    first: int
    last: int
    target: int
    source: int
    size: int


@dataclass
class _Copy:
    """One copy: entries not yet submitted, and those under way by batch id."""

    job: CopyJob
    session: str
    waiting: deque[_Entry]
    running: dict[int, _Entry] = field(default_factory=dict)


class Poller:
    """One thread for all copies, so that one frozen peer holds up nobody else's."""

    def __init__(self, engine: TransferEngine, arena: Arena) -> None:
        self._engine, self._arena = engine, arena
        self._new: deque[_Copy] = deque()
        self._copies: list[_Copy] = []
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="mooncake-poll", daemon=True)
        self._thread.start()

    def submit(self, job: CopyJob, session: str, base_address: int) -> None:
        """Copy the blocks of `job` from the peer whose slot 0 lies at `base_address`."""
        self._new.append(_Copy(job, session, deque(self._entries(job, base_address))))
        self._wake.set()

    def _entries(self, job: CopyJob, base_address: int) -> list[_Entry]:
        slot_bytes, data = self._arena.layout.slot_bytes, self._arena.data_address
        entries: list[_Entry] = []
        for i, block in enumerate(job.blocks):
            target, source = data + block.slot * slot_bytes, base_address + block.source.slot * slot_bytes
            size = block.source.length
            last = entries[-1] if entries else None
            if (
                last is not None
                and (last.target + last.size, last.source + last.size) == (target, source)
                and last.size + size <= MERGED_BYTES
            ):
                entries[-1] = _Entry(last.first, i + 1, last.target, last.source, last.size + size)
            else:
                entries.append(_Entry(i, i + 1, target, source, size))
        return entries

    def close(self) -> None:
        """Begin nothing more and end; copies under way are left unsettled."""
        self._closing = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._poll()
        except BaseException as raised:
            error = raised
            raise
        finally:
            for copy in (*self._copies, *self._new):
                for entry in copy.running.values():
                    self._fail(copy, entry, Outcome.UNSETTLED)
                copy.job.finish(error)

    def _poll(self) -> None:
        wait_s = POLL_S
        while not self._closing:
            while self._new:
                self._copies.append(self._new.popleft())
            moved = sum(self._advance(copy) for copy in self._copies) > 0
            self._copies = [copy for copy in self._copies if not self._ended(copy)]
            if not self._copies and not self._new:
                self._wake.wait()
                self._wake.clear()
            else:
                wait_s = POLL_S if moved else min(1.2 * wait_s, SLOW_POLL_S)
                time.sleep(wait_s)

    def _advance(self, copy: _Copy) -> bool:
        """Submit what may go, take in what has ended; whether anything happened."""
        moved = False
        while copy.waiting and len(copy.running) < IN_FLIGHT and not copy.job.stopped:
            entry = copy.waiting.popleft()
            batch = self._engine.batch_transfer_async_read(copy.session, [entry.target], [entry.source], [entry.size])
            moved = True
            if batch:
                copy.running[batch] = entry
            else:
                self._fail(copy, entry, Outcome.FAILED)
        for batch, entry in list(copy.running.items()):
            status = self._engine.transfer_check_status(batch)
            if status == _RUNNING:
                continue
            moved = True
            del copy.running[batch]
            if status == _ARRIVED:
                self._arrived(copy.job, entry)
            else:
                self._fail(copy, entry, Outcome.UNSETTLED if status == _TIMED_OUT else Outcome.FAILED)
        return moved

    def _fail(self, copy: _Copy, entry: _Entry, outcome: Outcome) -> None:
        """A peer that fails one entry fails the rest: begin no more of this copy."""
        copy.job.stop()
        for i in range(entry.first, entry.last):
            copy.job.outcomes[i] = outcome

    def _arrived(self, job: CopyJob, entry: _Entry) -> None:
        for i in range(entry.first, entry.last):
            block = job.blocks[i]
            right = self._arena.matches(block.slot, block.source.length, block.source.fingerprint)
            job.outcomes[i] = Outcome.ARRIVED if right else Outcome.CORRUPT

    def _ended(self, copy: _Copy) -> bool:
        if copy.running or (copy.waiting and not copy.job.stopped):
            return False
        copy.job.finish()
        return True
