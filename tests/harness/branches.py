"""A timed cluster that plays a script, and its branches as a tree."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster import Cluster
from tests.harness.programs import write_script

FAST = (
    *("--engine", "timed", "--nodes", "2"),
    *("--set", "engine.timed.speed=200"),
    *("--set", "engine.timed.max_context_tokens=131072"),
    *("--set", "engine.timed.l1_tokens=262144"),
)
QUIET_S = 1.5


@dataclass(frozen=True)
class Leaf:
    """One branch without its id; `parent` is the index of another in the list."""

    parent: int | None
    kind: str
    version: int
    state: str


class Tree:
    """The branches a cluster knows, in the order in which they were first seen, parents first."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.order: list[str] = []

    async def listed(self) -> list[dict[str, Any]]:
        """Once nothing has changed for a while: in the order in which they were first seen, parents first."""
        former: Any = None
        while True:
            found = {branch["id"]: branch for branch in (await self.cluster.get("/v1/branches"))["branches"]}
            state = [(b["id"], b["version"], b["state"], b["kind"], b["blocks"]) for b in found.values()]
            if state == former:
                break
            former = state
            await asyncio.sleep(QUIET_S)
        new = [branch for name, branch in found.items() if name not in self.order]
        new.sort(key=lambda branch: (branch["parent"] is not None, branch["last_seen"]))
        self.order += [branch["id"] for branch in new]
        return [found[name] for name in self.order]

    async def leaves(self) -> list[Leaf]:
        listed = await self.listed()
        at = {branch["id"]: number for number, branch in enumerate(listed)}
        return [Leaf(at.get(b["parent"]), b["kind"], b["version"], b["state"]) for b in listed]

    @property
    def nats_url(self) -> str:
        return str(self.cluster.state()["nats_url"])


@asynccontextmanager
async def scripted(path: Path, rules: list[dict[str, Any]], *settings: str) -> AsyncIterator[Tree]:
    """`ei up` on timed nodes that answer by these rules."""
    script = write_script(path / "script.json", rules)
    async with Cluster.up(*FAST, "--script", str(script), *settings, ready_s=180) as cluster:
        yield Tree(cluster)


def calls(name: str, **arguments: Any) -> list[dict[str, Any]]:
    """A scripted call of one tool."""
    return [{"name": name, "arguments": json.loads(json.dumps(arguments))}]
