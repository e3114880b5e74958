"""Whoever follows a pool's location events."""

import asyncio

from schemas.kv import (
    KV_LOCATION,
    ChangeType,
    KvLocation,
    Tier,
    keys_of,
)
from schemas.subjects import Subjects
from services.bus import Bus, Delivery

SUBJECTS = Subjects()


class Listener:
    """Everything said on the location subject of a node, in order."""

    def __init__(self) -> None:
        self.messages: list[KvLocation] = []
        self.came = asyncio.Event()

    async def take(self, delivery: Delivery) -> None:
        self.messages.append(KV_LOCATION.decode(delivery.data))
        self.came.set()

    async def held(self, tier: Tier, count: int) -> set[int]:
        """The keys of a tier once there are `count`; numbers have no gap."""
        async with asyncio.timeout(20):
            while len(keys := self._keys(tier)) != count:
                self.came.clear()
                await self.came.wait()
        return keys

    def _keys(self, tier: Tier) -> set[int]:
        keys: set[int] = set()
        seq = 0
        for message in self.messages:
            assert message.seq == seq + bool(message.changes)
            seq = message.seq
            for change in message.changes:
                if change.tier is not tier:
                    continue
                if change.type is ChangeType.CLEARED:
                    keys.clear()
                elif change.type is ChangeType.STORED:
                    keys |= set(keys_of(change.hashes).tolist())
                else:
                    keys -= set(keys_of(change.hashes).tolist())
        return keys


async def listening(bus: Bus, node: str) -> Listener:
    listener = Listener()
    await bus.subscribe(SUBJECTS.kv_location(node), listener.take)
    return listener
