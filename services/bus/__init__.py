"""The message bus: NATS between processes, one in memory for tests. Everything public is imported from here."""

from services.bus.memory import MemoryBus
from services.bus.memory_hub import MemoryHub
from services.bus.nats_bus import NatsBus
from services.bus.outbox import Outbox
from services.bus.types import (
    Bus,
    BusError,
    BusRefused,
    BusStats,
    BusTimeout,
    BusUnavailable,
    Delivery,
    EndpointStats,
    Handler,
    NoResponders,
    PayloadTooLarge,
    RemoteError,
    Responder,
    Start,
    StreamError,
    Subscription,
)

__all__ = [
    "Bus",
    "BusError",
    "BusRefused",
    "BusStats",
    "BusTimeout",
    "BusUnavailable",
    "Delivery",
    "EndpointStats",
    "Handler",
    "MemoryBus",
    "MemoryHub",
    "NatsBus",
    "NoResponders",
    "Outbox",
    "PayloadTooLarge",
    "RemoteError",
    "Responder",
    "Start",
    "StreamError",
    "Subscription",
]
