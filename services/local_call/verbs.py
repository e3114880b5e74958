"""What may be called on the pool's Unix socket: each verb with the messages it takes and gives."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from schemas import pool
from schemas.codec import Decoder, Message

RequestT = TypeVar("RequestT", bound=Message)
ReplyT = TypeVar("ReplyT", bound=Message)


@dataclass(frozen=True)
class Verb(Generic[RequestT, ReplyT]):
    """One verb of the socket."""

    name: str
    request: Decoder[RequestT]
    reply: Decoder[ReplyT]


ATTACH = Verb("attach", pool.ATTACH_REQUEST, pool.ATTACH_REPLY)
ALLOCATE = Verb("allocate", pool.ALLOCATE_REQUEST, pool.ALLOCATE_REPLY)
COMMIT = Verb("commit", pool.COMMIT_REQUEST, pool.COMMIT_REPLY)
FETCH = Verb("fetch", pool.FETCH_REQUEST, pool.FETCH_REPLY)
RELEASE = Verb("release", pool.RELEASE_REQUEST, pool.EMPTY)
LOCATE = Verb("locate", pool.LOCATE_REQUEST, pool.LOCATE_REPLY)
DEVICE = Verb("device", pool.DEVICE_CHANGES, pool.EMPTY)
STATUS = Verb("status", pool.EMPTY, pool.POOL_STATUS)

VERBS: dict[str, Verb[Any, Any]] = {
    verb.name: verb for verb in (ATTACH, ALLOCATE, COMMIT, FETCH, RELEASE, LOCATE, DEVICE, STATUS)
}
