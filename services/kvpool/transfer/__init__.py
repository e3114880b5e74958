"""Moving blocks from a peer's arena into the own one: one interface, shared memory and Mooncake behind it."""

from services.kvpool.transfer.types import BlockCopy, CopyJob, Outcome, Transport, TransportError

__all__ = ["BlockCopy", "CopyJob", "Outcome", "Transport", "TransportError"]
