"""The examples of docs/harnesses.md work as they stand there."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from schemas.branch import BranchEvent, decode_branch_event
from schemas.streams import branch_stream
from schemas.subjects import Subjects
from services.bus import Delivery, NatsBus
from services.router.core.identity import identify
from tests.conftest import Connect
from tests.engine_cluster import until

ROOT = Path(__file__).parents[2]
S = Subjects()
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NATS_COMMAND = """#!{python}
import asyncio, os, sys
import nats

async def main():
    arguments = sys.argv[2:]
    headers, words = {{}}, []
    while arguments:
        word = arguments.pop(0)
        if word == "-H":
            name, _, value = arguments.pop(0).partition(":")
            headers[name] = value
        else:
            words.append(word)
    broker = await nats.connect(os.environ["NATS_URL"])
    await broker.publish(words[0], words[1].encode(), headers=headers)
    await broker.drain()

assert sys.argv[1] == "pub"
asyncio.run(main())
"""


def examples(language: str, containing: str) -> str:
    """The one example in this language that contains this text."""
    (found,) = [
        text
        for name, text in FENCE.findall((ROOT / "docs" / "harnesses.md").read_text())
        if name == language and containing in text
    ]
    return str(found)


class Heard:
    def __init__(self) -> None:
        self.events: list[BranchEvent] = []

    async def hear(self, delivery: Delivery) -> None:
        self.events.append(decode_branch_event(delivery.data, delivery.headers, delivery.subject))

    async def until(self, count: int) -> list[tuple[str, str]]:
        await until(lambda: len(self.events) >= count)
        return [(event.branch, event.type.value) for event in self.events]


@pytest.fixture
async def heard(nats_url: str, nats_connect: Connect) -> Heard:
    bus = await nats_connect(nats_url)
    assert isinstance(bus, NatsBus)
    stream = branch_stream(S)
    await bus.ensure_stream(stream.name, stream.subjects, max_age_s=3600)
    found = Heard()
    await bus.follow(S.branch_events(), found.hear, start="all")
    return found


def run(command: list[str], nats_url: str, path: str = "") -> None:
    environ = os.environ | {"EI_NATS_URL": nats_url, "NATS_URL": nats_url, "PATH": f"{path}{os.environ['PATH']}"}
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr


async def test_the_shell_example(heard: Heard, nats_url: str, tmp_path: Path) -> None:
    command = tmp_path / "nats"
    command.write_text(NATS_COMMAND.format(python=sys.executable))
    command.chmod(0o755)
    run(["sh", "-ec", examples("sh", "nats pub")], nats_url, f"{tmp_path}:")
    assert await heard.until(1) == [("session-42", "open")]


async def test_the_msgpack_and_the_client_examples(heard: Heard, nats_url: str) -> None:
    run([sys.executable, "-c", examples("python", "msgpack")], nats_url)
    run([sys.executable, "-c", examples("python", "services.harness")], nats_url)
    kinds = [kind for _, kind in await heard.until(8)]
    assert kinds == ["open", "open", "subagent", "end", "fork", "compact", "keepalive", "end", *kinds[8:]]


def test_every_event_shown_is_one() -> None:
    lines = examples("json", '"subagent"').splitlines()
    for line in lines:
        event = json.loads(line)
        subject = S.branch_event(event["branch"])
        assert decode_branch_event(line.encode(), {"content-type": "application/json"}, subject).id == event["id"]
    assert [json.loads(line)["type"] for line in lines] == ["subagent", "fork", "compact", "keepalive", "end"]


def test_settings_shown_can_be_read() -> None:
    hooks = json.loads(examples("json", "SessionStart"))["hooks"]
    assert set(hooks) == {"SessionStart", "SubagentStart", "SubagentStop", "SessionEnd"}
    assert json.loads(examples("json", "ai-sdk"))["model"] == "local/MODEL"
    assert tomllib.loads(examples("toml", "wire_api"))["model_provider"] == "local"


def test_every_header_that_is_named_is_read() -> None:
    text = (ROOT / "docs" / "harnesses.md").read_text()
    for header in ("x-dynamo-session-id", "x-claude-code-session-id", "x-litellm-session-id", "x-ei-branch-id"):
        assert header in text
        assert identify("", {header: "b"}, {}).dialect
