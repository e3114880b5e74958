"""Forks services from one process that imported everything once, as `ei up` does: `fork_services COUNT`."""

import os
import signal
import sys

from services.app import run
from services.settings import load
from tests.integration.demo_service import Demo, DemoSettings


def main(count: int) -> int:
    """Fork `count` services, pass SIGTERM on to them, return how many did not end with 0."""
    children = []
    for number in range(count):
        child = os.fork()
        if child == 0:
            os._exit(run(Demo, load(DemoSettings, None, os.environ | {"EI_NAME": f"node-{number}"})))
        children.append(child)
    signal.signal(signal.SIGTERM, lambda *_: [os.kill(child, signal.SIGTERM) for child in children])
    return sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
