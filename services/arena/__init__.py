"""The arena of a node's KV pool: its layout, and the side of it that other processes map."""

from services.arena.layout import ArenaError, ArenaIdentity, ArenaLayout, SlotState, fingerprint_of
from services.arena.reader import ArenaReader

__all__ = ["ArenaError", "ArenaIdentity", "ArenaLayout", "ArenaReader", "SlotState", "fingerprint_of"]
