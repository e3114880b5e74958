"""The NATS services protocol: PING, INFO and STATS, so that `nats micro ls` shows every service."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from secrets import token_hex
from typing import Any

import msgspec

from services.bus import Bus, Delivery

_TYPE = "io.nats.micro.v1."
VERSION = "0.1.0"


@dataclass(frozen=True, slots=True)
class Identity:
    """Who answers: `name` is the service (ei-router), `id` this process of it."""

    name: str
    description: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    id: str = field(default_factory=lambda: token_hex(11))
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat())

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "type": f"{_TYPE}{kind}_response",
            "name": self.name,
            "id": self.id,
            "version": VERSION,
            "metadata": self.metadata,
        }


def _endpoint_name(subject: str) -> str:
    """An endpoint's name may hold letters, digits, `-` and `_` only."""
    return "_".join(token for token in subject.split(".")[2:]) or subject.replace(".", "_")


class Announcer:
    """Answers $SRV requests about the responders of one bus."""

    def __init__(self, bus: Bus, identity: Identity) -> None:
        self._bus, self._identity = bus, identity

    async def start(self) -> None:
        answers = {"PING": self.ping, "INFO": self.info, "STATS": self.stats}
        for verb, answer in answers.items():
            for subject in self._subjects(verb):
                await self._bus.respond(subject, answer)

    def _subjects(self, verb: str) -> list[str]:
        root = f"$SRV.{verb}"
        return [root, f"{root}.{self._identity.name}", f"{root}.{self._identity.name}.{self._identity.id}"]

    def _endpoints(self) -> list[Any]:
        return [e for e in self._bus.stats.endpoints if not e.subject.startswith("$SRV")]

    async def ping(self, request: Delivery) -> bytes:
        return msgspec.json.encode(self._identity.head("ping"))

    async def info(self, request: Delivery) -> bytes:
        endpoints = [
            {"name": _endpoint_name(e.subject), "subject": e.subject, "queue_group": e.queue, "metadata": {}}
            for e in self._endpoints()
        ]
        head = self._identity.head("info")
        return msgspec.json.encode(head | {"description": self._identity.description, "endpoints": endpoints})

    async def stats(self, request: Delivery) -> bytes:
        endpoints = [
            {
                "name": _endpoint_name(e.subject),
                "subject": e.subject,
                "queue_group": e.queue,
                "num_requests": e.requests,
                "num_errors": e.errors,
                "last_error": e.last_error,
                "processing_time": e.processing_ns,
                "average_processing_time": e.processing_ns // max(1, e.requests),
            }
            for e in self._endpoints()
        ]
        head = self._identity.head("stats")
        return msgspec.json.encode(head | {"started": self._identity.started, "endpoints": endpoints})
