"""A process that rewrites every slot of an arena as fast as it can, correctly. Arguments: path, seconds."""

import random
import sys
import time
from pathlib import Path

from services.arena import ArenaIdentity, ArenaReader
from services.kvpool.arena import Arena
from services.kvpool.core.blocks import Effects
from tests.pool_world import content, context

SLOTS, DIGESTS, SIZE = 6, 24, 64 << 10
IDENTITY = ArenaIdentity(model="tiny", block_size=16, block_bytes=SIZE, key_version="sha256-u32-v1")


def main() -> None:
    path, seconds = Path(sys.argv[1]), float(sys.argv[2])
    arena, found = Arena.open(path, IDENTITY, SLOTS, 1)
    arena.go_live(found.blocks, Effects())
    writer = ArenaReader(path, writable=True)
    digests = context("raced", DIGESTS)
    blocks = [content(digest, SIZE) for digest in digests]
    held: dict[int, int] = {}
    rng = random.Random(7)
    sys.stdout.write("live\n")
    sys.stdout.flush()
    until, generation = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        generation += 1
        slot = rng.randrange(SLOTS)
        if slot in held:
            arena.perform(Effects(freed=[slot]))
            del held[slot]
        which = rng.choice([i for i in range(DIGESTS) if i not in held.values()])
        arena.perform(Effects(begun=[(slot, generation, digests[which], b"")]))
        fingerprint = writer.write(slot, generation, blocks[which])
        assert fingerprint is not None
        arena.perform(Effects(committed=[(slot, SIZE, fingerprint)]))
        held[slot] = which
    arena.check()


if __name__ == "__main__":
    main()
