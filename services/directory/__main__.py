"""`ei-directory`: the command."""

import sys

from services.app import command
from services.directory.collector import ShortCollections
from services.directory.service import DirectoryService
from services.directory.settings import DirectorySettings


def main() -> int:
    """Run the directory as this process; its exit code."""
    ShortCollections()
    return command(DirectorySettings, DirectoryService)


if __name__ == "__main__":
    sys.exit(main())
