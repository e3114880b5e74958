"""A process that holds allocations and pins of a pool until it is killed. Arguments: socket, model, block bytes.

With a fourth argument it closes its connection, and lives on, once it holds them.
"""

import sys
import time
from pathlib import Path

from schemas.pool import AllocateRequest, AttachRequest, CommitRequest, FetchRequest
from services.local_call import ALLOCATE, COMMIT, FETCH, BlockingLocalClient
from tests.pool_world import context


def main() -> None:
    socket, model, block_bytes = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    attach = AttachRequest(
        role="storage", model=model, block_size=16, block_bytes=block_bytes, key_version="sha256-u32-v1"
    )
    client = BlockingLocalClient(socket, attach, timeout_s=10.0)
    pinned, held = context("pinned", 3), context("held", 4)
    reply = client.call(ALLOCATE, AllocateRequest(digests=b"".join(pinned)))
    written = [(*slot, 8, bytes(16)) for slot in reply.slots if slot is not None]
    client.call(COMMIT, CommitRequest(slots=written))
    client.call(FETCH, FetchRequest(id="pins", digests=b"".join(pinned)))
    client.call(ALLOCATE, AllocateRequest(digests=b"".join(held)))
    if len(sys.argv) > 4:
        client.close()
    sys.stdout.write("holding\n")
    sys.stdout.flush()
    time.sleep(600)


if __name__ == "__main__":
    main()
