"""`ei-kvpool`: the KV pool of one node."""

import sys

from services.app import command
from services.kvpool.service import KvPool
from services.kvpool.settings import KvPoolSettings


def main() -> int:
    """Run the service until it is stopped."""
    return command(KvPoolSettings, KvPool)


if __name__ == "__main__":
    sys.exit(main())
