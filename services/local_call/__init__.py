"""Calls to the KV pool of the own node over its Unix socket: frames, verbs, an asyncio client and a blocking one."""

from services.local_call.aio import LocalClient
from services.local_call.blocking import BlockingLocalClient
from services.local_call.frames import MAX_FRAME_BYTES, FrameSplitter, PoolRefused, PoolUnavailable, frame
from services.local_call.verbs import ALLOCATE, ATTACH, COMMIT, DEVICE, FETCH, LOCATE, RELEASE, STATUS, VERBS, Verb

__all__ = [
    "ALLOCATE",
    "ATTACH",
    "COMMIT",
    "DEVICE",
    "FETCH",
    "LOCATE",
    "MAX_FRAME_BYTES",
    "RELEASE",
    "STATUS",
    "VERBS",
    "BlockingLocalClient",
    "FrameSplitter",
    "LocalClient",
    "PoolRefused",
    "PoolUnavailable",
    "Verb",
    "frame",
]
