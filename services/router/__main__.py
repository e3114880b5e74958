"""`ei-router`: the command."""

import sys

from services.app import command
from services.router.collector import collect_rarely
from services.router.service import RouterService
from services.router.settings import RouterSettings


def main() -> int:
    """Run the router as this process; returns its exit code."""
    collect_rarely()
    return command(RouterSettings, RouterService)


if __name__ == "__main__":
    sys.exit(main())
