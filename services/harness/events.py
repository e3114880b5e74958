"""A branch event as JSON, and the subject it travels on: the wire of docs/protocol.md, without our schemas."""

import hashlib
import json
import secrets
import time
from typing import Any, NamedTuple

TYPES = ("open", "fork", "subagent", "compact", "end", "keepalive")
DEFAULT_URL = "nats://127.0.0.1:4222"
MAX_ID_CHARACTERS = 256


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
        if name is not None and not 0 < len(name) <= MAX_ID_CHARACTERS:
            raise ValueError(f"a branch id has 1 to {MAX_ID_CHARACTERS} characters, got {len(name)}")
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


def shard(branch: str, tenant: str = "") -> str:
    """The last token of the subject: two hex digits, behind the tenant's mark if it is not the default one."""
    mark = hashlib.sha256(tenant.encode()).hexdigest()[:16] + "-" if tenant else ""
    return mark + hashlib.sha256(branch.encode()).hexdigest()[:2]
