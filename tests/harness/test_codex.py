"""Codex itself: turns, a sub-agent, a compaction that its window numbers."""

import json
from pathlib import Path

import pytest

from tests.harness.branches import Leaf, Tree, calls, scripted
from tests.harness.programs import MODEL, Place, only, program

pytestmark = [pytest.mark.harness, pytest.mark.timeout(600)]

CHILD, SPAWN, DONE = "CHILD TASK", "SPAWN please", "child says hi"
LAST = "These were my last words."
RULES = [
    {"prompt": only(CHILD, without=SPAWN), "text": DONE},
    {"prompt": only(SPAWN, without="agent_id"), "calls": calls("spawn_agent", message=f"{CHILD} say hi")},
    {"prompt": only(SPAWN), "text": f"{'I wait for it. ' * 400}{LAST}"},
    {"text": "ok hello"},
]
"""The parent's last answer is long: Codex ends with it, and its sub-agent with Codex. It is longer than the answer to a
chat without a limit may be (`default_max_tokens`): Codex names none, and must get all of it."""


def place(tree: Tree, folder: Path, compact_at: int) -> Place:
    found = Place(program("codex"), folder, {})
    config = folder / "home" / ".codex" / "config.toml"
    config.parent.mkdir()
    config.write_text(
        f"""
model = "{MODEL}"
model_provider = "local"
model_context_window = 131072
model_auto_compact_token_limit = {compact_at}

[model_providers.local]
name = "local"
base_url = "{tree.cluster.url}/v1"
wire_api = "responses"
"""
    )
    return found


async def thread_of(output: str) -> str:
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return next(str(line["thread_id"]) for line in lines if line["type"] == "thread.started")


async def test_a_thread_is_a_branch_and_its_window_the_version(tmp_path: Path) -> None:
    program("codex")
    async with scripted(tmp_path, RULES) as tree:
        patient = place(tree, tmp_path / "codex", compact_at=120_000)
        said = await patient.run("exec", "--skip-git-repo-check", "--json", "hello")
        thread = await thread_of(said)
        assert await tree.leaves() == [Leaf(None, "main", 0, "active")]
        assert tree.order == [thread]

        resume = ("exec", "resume", thread, "--skip-git-repo-check", "--json")
        await patient.run(*resume, "go on")
        assert await tree.leaves() == [Leaf(None, "main", 0, "active")]

        eager = (tmp_path / "codex" / "home" / ".codex" / "config.toml").read_text()
        config = tmp_path / "codex" / "home" / ".codex" / "config.toml"
        config.write_text(eager.replace("120000", "1000"))
        await patient.run(*resume, "compact first, then this")
        (main,) = await tree.leaves()
        assert main.version >= 1
        once = main.version

        config.write_text(eager)
        await patient.run(*resume, "after")
        assert await tree.leaves() == [Leaf(None, "main", once, "active")]


async def test_a_sub_agent_has_a_thread_of_its_own(tmp_path: Path) -> None:
    program("codex")
    async with scripted(tmp_path, RULES) as tree:
        spawning = place(tree, tmp_path / "codex", compact_at=120_000)
        said = await spawning.run("exec", "--skip-git-repo-check", "--json", SPAWN)
        assert LAST in said, "its answer was cut"
        thread = await thread_of(said)
        leaves = await tree.leaves()
        assert tree.order[0] == thread
        assert leaves == [Leaf(None, "main", 0, "active"), Leaf(0, "subagent", 0, "active")]
