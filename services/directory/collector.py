"""Python's garbage collector, kept from walking the tree again and again: at millions of blocks that takes tens of
milliseconds, in which nothing is answered."""

import asyncio
import gc
import time

YOUNG, MIDDLE, OLD = 2_000, 2, 1
"""Allocations before a collection of the youngest, such collections before one of the middle, and those before a full
one, which comes when a quarter has been added as well."""
LONGEST_S = 0.001
TIDY_S = 0.1


class ShortCollections:
    """To be made once, by the process: what is there is left to its reference counts as soon as a full collection takes
    longer than LONGEST_S. The core makes no cycles of what it forgets, so nothing stays for that.

    Python counts what is made less what goes, and events replace as much as they make: without `run`, what is new piles
    up by ten thousands before it looks at it.
    """

    def __init__(self) -> None:
        self._began = 0.0
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG, MIDDLE, OLD)
        gc.callbacks.append(self._collecting)

    async def run(self) -> None:
        """Look at what is new every TIDY_S."""
        while True:
            await asyncio.sleep(TIDY_S)
            self.tidy()

    def tidy(self) -> None:
        """Collect what is new, and leave what stays to its reference counts."""
        gc.collect(1)
        gc.freeze()

    def _collecting(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        elif info["generation"] == len(gc.get_threshold()) - 1 and time.perf_counter() - self._began > LONGEST_S:
            gc.freeze()
