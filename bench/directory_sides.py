"""The two indexes behind one set of hands; each side runs in a process of its own, told by lines of JSON.

`python -m bench.directory_sides SIDE SHAPE BLOCKS NODES`; a line `["build"]`, `["match", 100]` or `["churn", runs]` is
answered by one line.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from bench.directory_load import CHURN_LIVE_BLOCKS, CHURN_RUN_BLOCKS, SHAPES, Keys, Stored, churn
from services.directory.collector import ShortCollections

CHURN_FROM_BLOCKS = 100_000
PART_MESSAGES = 128
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
Result = dict[str, Any]


class Index(Protocol):
    """One index in its own terms: messages and questions are made before the clock runs."""

    def stored(self, stored: Stored) -> Any: ...
    def removed(self, stored: Stored) -> Any: ...
    def apply(self, messages: Sequence[Any], at_once: int | None = None) -> None: ...
    def question(self, number: int, keys: Keys) -> Any: ...
    def ask(self, question: Any) -> Any: ...
    def after(self, question: Any) -> None: ...
    def found(self, answer: Any) -> int: ...
    def settle(self, contexts: list[Keys]) -> None: ...


def rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE_BYTES


def quietest(rounds: list[list[float]], share: float) -> float:
    """The smallest of the rounds' quantiles: what was measured while others used the machine least."""
    return min(sorted(seconds)[int(share * len(seconds))] for seconds in rounds)


class Hands:
    """Answers the lines: builds anew, matches, churns."""

    def __init__(self, make: Callable[[], Index], shape: str, blocks: int, nodes: int) -> None:
        self._make = make
        self._load = SHAPES[shape](blocks, nodes)
        maker = make()
        self._messages = [maker.stored(stored) for stored in self._load.stores]
        self._index: Index | None = None
        self._asked = 0

    def build(self, at_once: int | None = None) -> Result:
        """All events applied to a new index, message bytes to answerable: seconds of each part, memory that stays."""
        self._index = None
        gc.unfreeze()  # the index before: unlike what an index forgets, a whole one is full of cycles
        gc.collect()
        before = rss_bytes()
        index = self._make()
        cpu, seconds = time.process_time(), []
        for first in range(0, len(self._messages), PART_MESSAGES):
            part = self._messages[first : first + PART_MESSAGES]
            began = time.perf_counter()
            index.apply(part, at_once)
            seconds.append(time.perf_counter() - began)
        cpu = time.process_time() - cpu
        gc.collect()
        grown = rss_bytes() - before
        self._index = index
        index.settle(self._load.contexts)
        blocks = self._load.blocks
        return {"blocks": blocks, "seconds": seconds, "cpu_s": cpu, "bytes_per_copy": grown / blocks}

    def match(self, times: int, verb: str = "ask") -> Result:
        """Seconds of each of `times` matches of whole contexts, one after another far from it; keys are just made."""
        index, contexts = self._index, self._load.contexts
        assert index is not None
        took: list[float] = []
        clock, ask = time.perf_counter, getattr(index, verb)
        gc.collect()
        gc.disable()
        for number in range(self._asked, self._asked + times):
            question = index.question(number, contexts[number * 7919 % len(contexts)])
            began = clock()
            answer = ask(question)
            took.append(clock() - began)
            index.after(question)
        gc.enable()
        self._asked += times
        number = (self._asked - 1) * 7919 % len(contexts)
        found = index.found(index.ask(question))
        assert found == len(contexts[number]), (answer, found, len(contexts[number]))
        return {"seconds": took}

    def churn(self, runs: int) -> Result:
        """Store and remove `runs` runs over a live set; RSS after the first 100,000 blocks, and its growth since."""
        index = self._make()
        kept = CHURN_LIVE_BLOCKS // CHURN_RUN_BLOCKS
        fresh = churn(kept + runs)
        live = [next(fresh) for _ in range(kept)]
        index.apply([index.stored(stored) for stored in live])
        start = 0
        for number, stored in enumerate(fresh):
            live.append(stored)
            index.apply([index.stored(stored), index.removed(live.pop(0))])
            if number == CHURN_FROM_BLOCKS // CHURN_RUN_BLOCKS:
                gc.collect()
                start = rss_bytes()
        gc.collect()
        return {"blocks": runs * CHURN_RUN_BLOCKS, "start_bytes": start, "growth": rss_bytes() / start - 1}


def main() -> None:
    side, shape, blocks, nodes = sys.argv[1:5]
    if side == "ours":
        from bench.directory_ours import Ours as Side
    else:
        from bench.directory_peer import Peer as Side  # type: ignore[assignment]  # the same methods
    ShortCollections()
    hands = Hands(lambda: Side(int(nodes)), shape, int(blocks), int(nodes))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        verb, *given = json.loads(line)
        print(json.dumps(getattr(hands, verb)(*given)), flush=True)


if __name__ == "__main__":
    main()
