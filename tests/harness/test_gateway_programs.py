"""The gateway in front of a cluster, with real programs in front of the gateway: nothing is lost on the way."""

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.cluster import EI, free_port
from tests.harness import test_claude_code as claude_code
from tests.harness import test_codex as codex
from tests.harness.branches import Leaf, scripted
from tests.harness.programs import program

pytestmark = [pytest.mark.harness, pytest.mark.timeout(600)]
READY_S = 60.0


class Gateway:
    """A running `ei gateway`; `url` is what a program is told."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url, self._http = url, http

    async def branches(self) -> list[dict[str, Any]]:
        """The branches it saw, oldest first."""
        async with self._http.get(f"{self.url}/gateway/branches") as response:
            found: list[dict[str, Any]] = (await response.json())["branches"]
        return sorted(found, key=lambda branch: branch["parent"] is not None)

    async def ready(self) -> None:
        """Wait until it answers."""
        async with asyncio.timeout(READY_S):
            while True:
                try:
                    async with self._http.get(f"{self.url}/gateway/health"):
                        return
                except aiohttp.ClientError:
                    await asyncio.sleep(0.05)


@asynccontextmanager
async def gateway(upstream: str) -> AsyncIterator[Gateway]:
    """`ei gateway` without a broker, in front of `upstream`."""
    port = free_port()
    command = [*EI, "gateway", "--upstream", upstream, "--port", str(port)]
    process = subprocess.Popen(command)  # noqa: ASYNC220 - fork and exec only
    try:
        async with aiohttp.ClientSession() as http:
            made = Gateway(f"http://127.0.0.1:{port}", http)
            await made.ready()
            yield made
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 30)


async def test_claude_code_through_the_gateway(tmp_path: Path) -> None:
    program("claude")
    async with scripted(tmp_path, claude_code.RULES) as tree, gateway(tree.cluster.url) as between:
        place = claude_code.place(tree, tmp_path / "claude", hints=True, hooks=False)
        place.environ = {**place.environ, "ANTHROPIC_BASE_URL": between.url}
        session = claude_code.Session(place)
        spawned = await session.say(claude_code.SPAWN)
        assert spawned["subagent_stats"]["completed"] == 1
        await session.say("go on")
        assert await tree.leaves() == [Leaf(None, "main", 0, "active"), Leaf(0, "subagent", 0, "active")]
        main, child = await between.branches()
        assert (main["id"], child["parent"]) == (session.id, session.id)
        assert child["id"].startswith(f"{session.id}/")
        assert [(found["kind"], found["version"], found["dialect"]) for found in (main, child)] == [
            ("main", 0, "claude-code"),
            ("subagent", 0, "claude-code"),
        ]
        assert main["requests"] >= 3, "with the tool call, after it, and the next turn"
        assert main["prefix_stability"] > 0.9
        await session.say("/compact")
        await session.say("after compaction")
        await session.say("and once more")
        assert [found["version"] for found in await between.branches()] == [1, 0]
        assert [leaf.version for leaf in await tree.leaves()] == [1, 0]


async def test_codex_through_the_gateway(tmp_path: Path) -> None:
    program("codex")
    async with scripted(tmp_path, codex.RULES) as tree, gateway(tree.cluster.url) as between:
        place = codex.place(tree, tmp_path / "codex", compact_at=120_000)
        config = tmp_path / "codex" / "home" / ".codex" / "config.toml"
        config.write_text(config.read_text().replace(tree.cluster.url, between.url))
        thread = await codex.thread_of(await place.run("exec", "--skip-git-repo-check", "--json", "hello"))
        await place.run("exec", "resume", thread, "--skip-git-repo-check", "--json", "go on")
        assert await tree.leaves() == [Leaf(None, "main", 0, "active")]
        (main,) = await between.branches()
        assert (main["id"], main["kind"], main["version"], main["dialect"]) == (thread, "main", 0, "codex")
        assert main["requests"] >= 2
