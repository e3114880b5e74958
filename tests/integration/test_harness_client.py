"""The harness client and `ei-hook` against a real broker with the permissions of the roles, and without one."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from schemas.branch import BranchEvent, decode_branch_event
from schemas.roles import Role, grant
from schemas.streams import branch_stream
from schemas.subjects import Subjects
from services.broker import Broker, BrokerConfig, Member, users, write_keys
from services.bus import Delivery, NatsBus
from services.harness import Harness
from tests.conftest import Connect
from tests.engine_cluster import until

S = Subjects()
OPERATOR, CLIENT = Member(Role.OPERATOR, "operator"), Member(Role.HARNESS, "harness")
HOOK = [sys.executable, "-m", "services.harness.hook"]


class Stream:
    """A broker with keys and the branch stream; `events` are what it stored."""

    def __init__(self, broker: Broker, keys: dict[Member, Path]) -> None:
        self.url, self.keys = broker.url, keys
        self.events: list[BranchEvent] = []

    async def hear(self, delivery: Delivery) -> None:
        self.events.append(decode_branch_event(delivery.data, delivery.headers, delivery.subject))

    async def until(self, count: int) -> list[tuple[str, str]]:
        await until(lambda: len(self.events) >= count)
        return [(event.branch, event.type.value) for event in self.events]


@pytest.fixture
async def stream(broker: Broker, tmp_path: Path, nats_connect: Connect) -> Stream:
    keys = write_keys(tmp_path / "keys", [OPERATOR, CLIENT])
    broker.config = BrokerConfig(users=users(keys, S), anonymous=grant(Role.ANONYMOUS, S))
    broker.start()
    found = Stream(broker, keys)
    bus = await nats_connect(
        broker.url, name="operator", nkey_seed=keys[OPERATOR].read_text().strip(), inbox="_INBOX.operator"
    )
    assert isinstance(bus, NatsBus)
    branches = branch_stream(S)
    await bus.ensure_stream(branches.name, branches.subjects, max_age_s=3600)
    await bus.follow(S.branch_events(), found.hear, start="all")
    return found


@pytest.mark.parametrize("keyed", [False, True])
async def test_the_life_of_a_branch(stream: Stream, keyed: bool) -> None:
    nkey = str(stream.keys[CLIENT]) if keyed else ""
    with Harness(stream.url, nkey=nkey) as harness, harness.branch("b") as branch:
        assert branch.headers == {"x-ei-branch-id": "b", "x-ei-branch-version": "0"}
        with branch.subagent("b/sub") as child:
            assert child.headers["x-ei-branch-parent"] == "b"
            assert child.headers["x-ei-branch-kind"] == "subagent"
        branch.compact()
        assert branch.headers["x-ei-branch-version"] == "1"
        fork = branch.fork("b/fork")
        branch.keepalive()
        fork.end()
        fork.end()
    assert await stream.until(8) == [
        ("b", "open"),
        ("b/sub", "subagent"),
        ("b/sub", "end"),
        ("b", "compact"),
        ("b/fork", "fork"),
        ("b", "keepalive"),
        ("b/fork", "end"),
        ("b", "end"),
    ]
    assert (harness.publisher.stored, harness.publisher.dropped) == (8, 0)
    assert stream.events[3].version == 1


async def test_what_was_said_while_the_broker_was_away_arrives_in_order(stream: Stream, broker: Broker) -> None:
    with Harness(stream.url) as harness:
        harness.say("b", "open")
        await stream.until(1)
        broker.kill()
        start = time.monotonic()
        for _ in range(3):
            harness.say("b", "keepalive")
        assert time.monotonic() - start < 0.1
        broker.start()
        await until(lambda: harness.publisher.stored == 4)


def test_no_broker_costs_nothing_but_two_seconds_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    start = time.monotonic()
    with Harness("nats://127.0.0.1:1") as harness, harness.branch("b") as branch:
        branch.compact()
        assert time.monotonic() - start < 0.2
    assert time.monotonic() - start < 5.0
    assert harness.publisher.dropped == 3
    assert "branch events are lost" in caplog.text


def test_the_folder_alone_is_enough(tmp_path: Path) -> None:
    shutil.copytree(Path(__file__).parents[2] / "services" / "harness", tmp_path / "vendored")
    code = (
        "import sys, vendored, vendored.hook\n"
        "mine = [name for name in sys.modules if name.split('.')[0] in ('schemas', 'services', 'msgspec')]\n"
        "assert not mine, mine"
    )
    subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, check=True
    )


def hook(given: Any, **environ: str) -> subprocess.CompletedProcess[bytes]:
    text = given if isinstance(given, bytes) else json.dumps(given).encode()
    return subprocess.run(HOOK, input=text, env=os.environ | environ, capture_output=True, timeout=20, check=False)


async def test_the_hook_publishes_with_nothing_but_the_brokers_address(stream: Stream) -> None:
    recorded = Path(__file__).parents[1] / "fixtures" / "harness" / "claude_code_hooks.jsonl"
    lines = [line for line in recorded.read_bytes().splitlines() if b'"compact"' in line or b"SubagentStart" in line]
    for line in lines:
        done = hook(line, EI_NATS_URL=stream.url, EI_HOOK_TIMEOUT_S="10")
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    kinds = [kind for _, kind in await stream.until(2)]
    assert kinds == ["subagent", "compact"]
    assert {event.source for event in stream.events} == {"ei-hook"}


@pytest.mark.parametrize("given", [b"{", b'{"branch": "b", "type": "end"}'])
def test_a_hook_never_fails_the_harness(given: bytes) -> None:
    done = hook(given, EI_NATS_URL="nats://127.0.0.1:1")
    assert (done.returncode, done.stdout) == (0, b"")
    assert done.stderr.startswith(b"ei-hook: ")


def test_a_hook_whose_broker_or_input_is_silent_ends_in_time() -> None:
    start = time.monotonic()
    process = subprocess.Popen(
        HOOK, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"EI_HOOK_TIMEOUT_S": "0.3"}
    )
    assert process.wait(10) == 0
    assert process.stdin is not None
    assert process.stderr is not None
    assert b"gave up" in process.stderr.read()
    process.stdin.close()
    process.stderr.close()
    assert time.monotonic() - start < 8.0
