"""A branch event as JSON, and the subject it travels on: the wire of docs/protocol.md, without our schemas."""

import hashlib
import json
import secrets
import time
from typing import Any, NamedTuple

TYPES = ("open", "fork", "subagent", "compact", "end", "keepalive")
DEFAULT_URL = "nats://127.0.0.1:4222"
MAX_ID_CHARACTERS, MAX_EVENT_ID_CHARACTERS = 256, 128
LARGEST_VERSION = 2_147_483_647


class Event(NamedTuple):
    """One event, ready to publish. `id` makes a repeat harmless."""

    id: str
    subject: str
    data: bytes

    @property
    def headers(self) -> dict[str, str]:
        return {"content-type": "application/json", "Nats-Msg-Id": self.id}


def branch_event(
    branch: str,
    kind: str,
    *,
    parent: str | None = None,
    version: int | None = None,
    source: str = "harness",
    tenant: str = "",
    partition: str = "p0",
    event_id: str | None = None,
) -> Event:
    """What happened to `branch`: `kind` is one of TYPES. ValueError names what cannot be said."""
    if kind not in TYPES:
        raise ValueError(f"type must be one of {', '.join(TYPES)}, got {kind!r}")
    for name in (branch, parent):
        if name is not None and not (0 < len(name) <= MAX_ID_CHARACTERS and name.isprintable()):
            raise ValueError(f"a branch id has 1 to {MAX_ID_CHARACTERS} printable characters, got {_shown(name)}")
    if parent == branch:
        raise ValueError(f"branch {branch!r} cannot be its own parent")
    if version is not None and not 0 <= version <= LARGEST_VERSION:
        raise ValueError(f"a version is from 0 to {LARGEST_VERSION}, got {_shown(version)}")
    if event_id is not None and not (0 < len(event_id) <= MAX_EVENT_ID_CHARACTERS and event_id.isprintable()):
        most = MAX_EVENT_ID_CHARACTERS
        raise ValueError(f"an event id has 1 to {most} printable characters, got {_shown(event_id)}")
    if kind in ("fork", "subagent") and parent is None:
        raise ValueError(f"type {kind} needs the parent's id")
    said: dict[str, Any] = {
        "v": 1,
        "id": event_id or f"{source[:24]}-{secrets.token_hex(12)}",
        "t": time.time(),
        "branch": branch,
        "type": kind,
        "source": source,
    }
    said |= {key: value for key, value in (("parent", parent), ("version", version)) if value is not None}
    if tenant:
        said["tenant"] = tenant
    subject = f"ei.{partition}.branch.event.{shard(branch, tenant)}"
    return Event(said["id"], subject, json.dumps(said).encode())


def _shown(value: object) -> str:
    text = f"{len(value)} characters" if isinstance(value, str) and len(value) > 40 else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def shard(branch: str, tenant: str = "") -> str:
    """The last token of the subject: two hex digits, behind the tenant's mark if it is not the default one."""
    mark = hashlib.sha256(tenant.encode()).hexdigest()[:16] + "-" if tenant else ""
    return mark + hashlib.sha256(branch.encode()).hexdigest()[:2]
