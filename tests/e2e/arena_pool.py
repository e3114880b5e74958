"""A pool in the test's own process that serves one engine: a real arena file, allocate and commit, no eviction."""

import asyncio
import mmap
import os
from pathlib import Path

import numpy as np

from schemas.codec import encode
from schemas.pool import (
    ALLOCATE_REQUEST,
    ATTACH_REQUEST,
    COMMIT_REQUEST,
    AllocateReply,
    AttachReply,
    CommitReply,
    LocalReply,
    digests_of,
)
from services.arena.layout import HEADER, PAGE, ArenaIdentity, ArenaLayout, SlotState
from services.local_call.frames import FrameSplitter, decode_call, frame


class ArenaPool:
    """Blocks of one node. `stored` maps the digest of every committed block to its parent's digest."""

    def __init__(self, folder: Path, name: str, slots: int) -> None:
        self.socket = folder / f"{name}.sock"
        self._path = folder / f"{name}.arena"
        self._slots = slots
        self.stored: dict[bytes, bytes] = {}
        self.allocations: list[int] = []
        self._layout: ArenaLayout | None = None
        self._slot_of: dict[bytes, int] = {}
        self._writing: dict[int, tuple[bytes, bytes]] = {}

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, str(self.socket))

    async def stop(self) -> None:
        self._server.close()
        self._path.unlink(missing_ok=True)

    def _build(self, identity: ArenaIdentity) -> None:
        self._layout = layout = ArenaLayout.plan(identity, self._slots, 1)
        with self._path.open("wb+") as file:
            os.posix_fallocate(file.fileno(), 0, layout.total_bytes)
            self._map = mmap.mmap(file.fileno(), layout.total_bytes)
        whole = np.frombuffer(self._map, np.uint8)
        self._index = whole[layout.index_offset :][: 4 * layout.buckets].view("<u4")
        self._headers = whole[layout.headers_offset :][: HEADER.itemsize * layout.slots].view(HEADER)
        page = bytearray(layout.page())
        page[8:12] = (1).to_bytes(4, "little")
        self._map[:PAGE] = bytes(page)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        splitter = FrameSplitter()
        while data := await reader.read(1 << 16):
            for body in splitter.feed(data):
                call = decode_call(body)
                reply = getattr(self, f"_{call.verb}")(call.body)
                writer.write(frame(LocalReply(call=call.call, body=encode(reply))))
        writer.close()

    def _attach(self, body: bytes) -> AttachReply:
        asked = ATTACH_REQUEST.decode(body)
        assert asked.role == "storage"
        if self._layout is None:
            self._build(
                ArenaIdentity(
                    model=asked.model,
                    block_size=asked.block_size,
                    block_bytes=asked.block_bytes,
                    key_version=asked.key_version,
                )
            )
        return AttachReply(ok=True, incarnation=1, arena=str(self._path), slots=self._slots)

    def _allocate(self, body: bytes) -> AllocateReply:
        asked = ALLOCATE_REQUEST.decode(body)
        slots: list[tuple[int, int] | None] = []
        parent = asked.parent
        for digest in digests_of(asked.digests):
            if digest in self._slot_of:
                slots.append(None)
            else:
                slot = self._slot_of[digest] = len(self._slot_of)
                self._writing[slot] = (digest, parent)
                header = self._headers[slot : slot + 1]
                header["generation"], header["state"] = 1, SlotState.WRITING
                slots.append((slot, 1))
            parent = digest
        self.allocations.append(sum(slot is not None for slot in slots))
        return AllocateReply(slots=slots)

    def _commit(self, body: bytes) -> CommitReply:
        asked = COMMIT_REQUEST.decode(body)
        for slot, generation, length, fingerprint in asked.slots:
            digest, parent = self._writing.pop(slot)
            header = self._headers[slot : slot + 1]
            header["digest"] = np.frombuffer(digest, "<u8")
            header["generation"], header["length"] = generation, length
            header["fingerprint"] = np.frombuffer(fingerprint, "V16")
            header["state"] = SlotState.COMMITTED
            self._enter(digest, slot)
            self.stored[digest] = parent
        return CommitReply(committed=len(asked.slots))

    def _enter(self, digest: bytes, slot: int) -> None:
        assert self._layout is not None
        bucket = int.from_bytes(digest[:8], "little") & (self._layout.buckets - 1)
        while self._index[bucket]:
            bucket = (bucket + 1) & (self._layout.buckets - 1)
        self._index[bucket] = slot + 1
