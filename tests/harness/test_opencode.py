"""OpenCode itself: a turn with a title request under the same id, and a sub-agent."""

import json
from pathlib import Path

import pytest

from tests.harness.branches import Leaf, Tree, calls, scripted
from tests.harness.programs import MODEL, Place, only, program

pytestmark = [pytest.mark.harness, pytest.mark.timeout(600)]

CHILD, SPAWN, DONE = "CHILD TASK", "SPAWN please", "child says hi"
RULES = [
    {"prompt": only(CHILD, without=SPAWN), "text": DONE},
    {
        "prompt": rf"(?s)\A(?!.*{DONE})(?=.*subagent_type).*{SPAWN}",
        "calls": calls("task", description="child", prompt=f"{CHILD} say hi", subagent_type="general"),
    },
    {"text": "ok hello"},
]


def place(tree: Tree, folder: Path) -> Place:
    environ = dict.fromkeys(
        ("OPENCODE_DISABLE_AUTOUPDATE", "OPENCODE_DISABLE_MODELS_FETCH", "OPENCODE_DISABLE_LSP_DOWNLOAD"), "1"
    )
    found = Place(program("opencode"), folder, environ)
    config = {
        "provider": {
            "local": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "local",
                "options": {"baseURL": f"{tree.cluster.url}/v1", "apiKey": "dummy-not-a-key"},
                "models": {MODEL: {"name": MODEL, "limit": {"context": 131_072, "output": 4096}}},
            }
        },
        "model": f"local/{MODEL}",
        "small_model": f"local/{MODEL}",
    }
    (folder / "work" / "opencode.json").write_text(json.dumps(config))
    return found


async def test_a_title_request_is_no_branch_and_a_sub_agent_is_one(tmp_path: Path) -> None:
    program("opencode")
    async with scripted(tmp_path, RULES) as tree:
        opencode = place(tree, tmp_path / "opencode")
        output = await opencode.run("run", "--format", "json", SPAWN)
        session = next(json.loads(line)["sessionID"] for line in output.splitlines() if "sessionID" in line)
        leaves = await tree.leaves()
        at = tree.order.index(session)
        assert leaves[at] == Leaf(None, "main", 0, "active")
        assert leaves[1 - at] == Leaf(at, "subagent", 0, "active")
        assert len(leaves) == 2

        await opencode.run("run", "--format", "json", "--session", session, "go on")
        assert len(await tree.leaves()) == 2, "the next turn is the same branch, at the same version"
        assert (await tree.leaves())[at].version == 0
