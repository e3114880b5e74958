"""The harness client and `ei-hook` where something is wrong: keys, addresses, settings, streams, processes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from schemas.branch import BranchEvent, decode_branch_event
from schemas.streams import branch_stream
from schemas.subjects import Subjects
from services.bus import Delivery
from services.harness import Harness
from services.harness.events import branch_event
from tests.conftest import Connect
from tests.engine_cluster import until

S = Subjects()
ROOT = Path(__file__).parents[2]
HOOK = [sys.executable, "-m", "services.harness.hook"]
EVENT = b'{"branch": "b", "type": "open"}'


def run(code: str, **environ: str) -> subprocess.CompletedProcess[bytes]:
    given = os.environ | {"PYTHONPATH": str(ROOT)} | environ
    return subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, timeout=30, check=False)


def hook(given: bytes = EVENT, **environ: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(HOOK, input=given, env=os.environ | environ, capture_output=True, timeout=20, check=False)


@pytest.fixture
async def heard(nats_url: str, nats_connect: Connect) -> list[BranchEvent]:
    """What is stored in the branch stream of `nats_url`."""
    bus = await nats_connect(nats_url)
    stream = branch_stream(S)
    await bus.ensure_stream(stream.name, stream.subjects, max_age_s=3600)
    found: list[BranchEvent] = []

    async def hear(delivery: Delivery) -> None:
        found.append(decode_branch_event(delivery.data, delivery.headers, delivery.subject))

    await bus.follow(S.branch_events(), hear, start="all")
    return found


@pytest.mark.parametrize(
    "environ",
    [
        {"EI_NATS_NKEY": "SUGARBAGE"},
        {"EI_NATS_NKEY": "/no/such/file"},
        {"EI_NATS_URL": "nats://x:port"},
        {"EI_HOOK_TIMEOUT_S": "nan"},
        {"EI_PARTITION": "p 0"},
    ],
)
def test_a_hook_with_a_wrong_setting_says_so_in_a_line_and_succeeds(environ: dict[str, str]) -> None:
    done = hook(**({"EI_NATS_URL": "nats://127.0.0.1:1"} | environ))
    assert (done.returncode, done.stdout) == (0, b"")
    assert done.stderr.startswith(b"ei-hook: "), done.stderr
    assert b"Traceback" not in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_a_hook_without_its_standard_streams_succeeds() -> None:
    for closed in ("<&-", "2>&-", "<&- >&- 2>&-"):
        command = f"echo '{EVENT.decode()}' | EI_NATS_URL=nats://127.0.0.1:1 {' '.join(HOOK)} {closed}"
        done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, timeout=20, check=False)
        assert (done.returncode, done.stdout) == (0, b""), closed
        assert b"Traceback" not in done.stderr, closed


def test_a_hook_says_why_the_broker_was_not_reached() -> None:
    done = hook(EI_NATS_URL="nats://127.0.0.1:1")
    assert b"nats://127.0.0.1:1: " in done.stderr
    assert b"refused" in done.stderr.lower() or b"connect" in done.stderr.lower(), done.stderr


async def test_empty_settings_are_not_given(heard: list[BranchEvent], nats_url: str) -> None:
    done = hook(EI_NATS_URL=nats_url, EI_PARTITION="", EI_NATS_NKEY="", EI_HOOK_TIMEOUT_S="")
    assert (done.returncode, done.stderr) == (0, b"")
    await until(lambda: len(heard) == 1)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"branch": "a\nb"}, "printable"),
        ({"branch": "b\ud83d"}, "printable"),
        ({"branch": "b", "kind": "fork", "parent": "b"}, "own parent"),
        ({"branch": "b", "kind": "compact", "version": 1 << 40}, "2147483647"),
        ({"branch": "b", "kind": "compact", "version": -1}, "2147483647"),
        ({"branch": "b", "event_id": "x\r\ny"}, "event"),
        ({"branch": "b", "event_id": "x" * 129}, "event"),
    ],
)
def test_what_is_no_event_is_refused_at_once(said: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        branch_event(**({"kind": "open"} | said))  # type: ignore[arg-type]


def test_a_name_that_no_header_carries_is_refused_before_any_request_has_it() -> None:
    with Harness("nats://127.0.0.1:1") as harness:
        for name in ("Köln", " b", "b\t"):
            with pytest.raises(ValueError, match="header"):
                harness.branch(name)
        assert harness.publisher.dropped == 0


def test_a_key_that_is_none_costs_events_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    with Harness("nats://127.0.0.1:1", nkey="SUGARBAGE") as harness, harness.branch("b") as branch:
        branch.compact()
    assert harness.publisher.dropped == 3
    assert "branch events are lost" in caplog.text
    harness.say("b", "keepalive")
    assert harness.publisher.dropped == 4, "what is said after the end is lost, and counted"


async def test_a_harness_that_is_never_closed_sends_what_it_said(heard: list[BranchEvent], nats_url: str) -> None:
    done = run("from services.harness import Harness; Harness().branch('b').end()", EI_NATS_URL=nats_url)
    assert (done.returncode, done.stderr) == (0, b"")
    await until(lambda: [event.type.value for event in heard] == ["open", "end"])


FORKS = """
import os
from services.harness import Harness

harness = Harness()
branch = harness.branch("parent")
while not harness.publisher.stored:
    pass
child = os.fork()
if child == 0:
    branch.subagent("child").end()
    harness.close()
    os._exit(0 if harness.publisher.dropped == 0 else 1)
assert os.waitpid(child, 0)[1] == 0
branch.end()
harness.close()
"""


async def test_a_process_forked_from_a_harness_goes_on_saying(heard: list[BranchEvent], nats_url: str) -> None:
    start = time.monotonic()
    done = run(FORKS, EI_NATS_URL=nats_url)
    assert (done.returncode, done.stderr) == (0, b""), done.stderr
    await until(lambda: len(heard) == 4)
    said = [(event.branch, event.type.value) for event in heard]
    assert said == [("parent", "open"), ("child", "subagent"), ("child", "end"), ("parent", "end")]
    assert time.monotonic() - start < 10.0
