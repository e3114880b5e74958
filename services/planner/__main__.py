"""`ei-planner`: the command."""

import sys

from services.app import command
from services.planner.service import PlannerService
from services.planner.settings import PlannerServiceSettings


def main() -> int:
    """Run the planner as this process; returns its exit code."""
    return command(PlannerServiceSettings, PlannerService)


if __name__ == "__main__":
    sys.exit(main())
