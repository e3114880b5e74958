"""`ei-directory`: the command."""

import sys

from services.app import App, command
from services.directory.collector import ShortCollections
from services.directory.service import DirectoryService
from services.directory.settings import DirectorySettings


def main() -> int:
    """Run the directory as this process; its exit code."""
    collections = ShortCollections()

    def build(app: App[DirectorySettings]) -> DirectoryService:
        app.tasks.create_task(collections.run(), name="garbage collections")
        return DirectoryService(app)

    return command(DirectorySettings, build)


if __name__ == "__main__":
    sys.exit(main())
