"""Claude Code itself: a turn with a sub-agent, a compaction, a fork, an end; with hints, with hooks, with neither."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.branches import Leaf, Tree, calls, scripted
from tests.harness.programs import HOOK, MODEL, Place, hook_environ, only, program

pytestmark = [pytest.mark.harness, pytest.mark.timeout(600)]

CHILD, SPAWN, DONE = "CHILD TASK", "SPAWN please", "child says hi"
RULES = [
    {"prompt": only(CHILD, without=SPAWN), "text": DONE},
    {
        "prompt": only(SPAWN, without=DONE),
        "text": "Spawning.",
        "calls": calls(
            "Agent",
            description="count files",
            prompt=f"{CHILD} say hi",
            subagent_type="general-purpose",
            run_in_background=False,
        ),
    },
    {"text": "<summary>ok hello world</summary>"},
]
HOOKED = ("SessionStart", "SubagentStart", "SubagentStop", "SessionEnd")


def place(tree: Tree, folder: Path, *, hints: bool, hooks: bool) -> Place:
    environ = {
        "ANTHROPIC_BASE_URL": tree.cluster.url,
        "ANTHROPIC_API_KEY": "dummy-not-a-key",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
        "CLAUDE_CODE_SUBAGENT_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
    }
    if hints:
        environ["CLAUDE_CODE_GATEWAY_HINT_HEADERS"] = "1"
    found = Place(program("claude"), folder, environ | (hook_environ(tree.nats_url) if hooks else {}))
    if hooks:
        settings = folder / "home" / ".claude" / "settings.json"
        settings.parent.mkdir()
        entry = [{"hooks": [{"type": "command", "command": HOOK, "timeout": 30}]}]
        settings.write_text(json.dumps({"hooks": dict.fromkeys(HOOKED, entry)}))
    return found


class Session:
    """One conversation, a process a turn."""

    def __init__(self, place: Place) -> None:
        self._place, self.id = place, ""

    async def say(self, text: str, *more: str) -> dict[str, Any]:
        resume = ("--resume", self.id) if self.id else ()
        output = await self._place.run(
            "-p", text, "--output-format", "json", "--allowedTools", "Agent,Task", *resume, *more
        )
        result: dict[str, Any] = json.loads(output)
        self.id = self.id or result["session_id"]
        return result


@pytest.mark.parametrize(("hints", "hooks"), [(False, False), (True, False), (True, True)])
async def test_a_session(tmp_path: Path, hints: bool, hooks: bool) -> None:
    program("claude")
    async with scripted(tmp_path, RULES) as tree:
        session = Session(place(tree, tmp_path / "claude", hints=hints, hooks=hooks))
        rests = "ended" if hooks else "active"

        spawned = await session.say(SPAWN)
        assert spawned["subagent_stats"]["completed"] == 1
        child = Leaf(0, "subagent", 0, rests)
        assert await tree.leaves() == [Leaf(None, "main", 0, rests), child]
        assert tree.order[0] == session.id
        assert tree.order[1].startswith(f"{session.id}/")

        await session.say("/compact")
        main = (await tree.leaves())[0]
        assert main.version == (1 if hooks else 0), "without a hook nothing says yet that the summary is used"

        await session.say("after compaction")
        await session.say("and once more")
        assert await tree.leaves() == [Leaf(None, "main", 1, rests), child], "one compaction, one version"

        await session.say("forked hello", "--fork-session")
        assert (await tree.leaves())[2:] == [Leaf(None, "main", 0, rests)], "its requests name no parent"


async def test_a_compaction_within_one_process_is_said_by_its_first_request(tmp_path: Path) -> None:
    program("claude")
    async with scripted(tmp_path, RULES) as tree:
        claude = place(tree, tmp_path / "claude", hints=True, hooks=False)
        turns = [
            {"type": "user", "message": {"role": "user", "content": [{"type": "text", "text": text}]}}
            for text in ("hello", "go on", "/compact", "after compaction")
        ]
        given = "".join(f"{json.dumps(turn)}\n" for turn in turns).encode()
        streams = ("--input-format", "stream-json", "--output-format", "stream-json", "--verbose")
        await claude.run("-p", *streams, given=given)
        assert await tree.leaves() == [Leaf(None, "main", 1, "active")]
