"""`ei-kvpool`: the KV pool of one node."""

import os
import sys

from services.app import command
from services.kvpool.service import KvPool
from services.kvpool.settings import KvPoolSettings


def main() -> int:
    """Run the pool as this process; returns its exit code."""
    code = command(KvPoolSettings, KvPool)
    if "mooncake.engine" in sys.modules:
        # Everything is closed; the transfer engine's library now and then crashes in the interpreter's own end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
