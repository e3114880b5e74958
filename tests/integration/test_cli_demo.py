"""`ei demo` on timed engines: the show ends well, or goes on serving until Ctrl-C; what is wrong is told."""

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from services.cli.demo.act import Played
from services.cli.demo.compare import compare, first_difference
from services.cli.demo.reference import TimedRule, timed_answer
from services.cli.demo.talk import Talk
from services.engine.timed.settings import TimedSettings
from tests.cluster import EI, free_port, leftovers

PROMPT = list(range(40, 90))


@pytest.mark.timeout(300)
def test_the_demo_ends_with_zero_when_nothing_was_lost_or_wrong() -> None:
    port = free_port()
    ended = subprocess.run(
        [*EI, "demo", "--engine", "timed", "--port", str(port)],
        env=dict(os.environ, RUN_EXIT="1", COLUMNS="120"),
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for text in ("split 1P2D after", "split 2P1D after", "lost KV reuse", "answers that differ", "no request was lost"):
        assert text in ended.stdout
    assert leftovers(port) == []


@pytest.mark.timeout(300)
def test_the_demo_serves_until_it_is_interrupted() -> None:
    port = free_port()
    environ = {key: value for key, value in os.environ.items() if key != "RUN_EXIT"}
    command = [*EI, "demo", "--engine", "timed", "--port", str(port)]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("serving on"):
                break
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=10) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert leftovers(port) == []


async def test_a_wrong_token_is_found_where_it_stands() -> None:
    right = timed_answer(PROMPT, 20, TimedSettings())
    wrong = [*right[:7], right[7] + 1, *right[8:]]
    asked: list[int] = []
    found = await compare(
        [Played("good", PROMPT, right), Played("bad", PROMPT, wrong), Played("short", PROMPT, right[:5])],
        TimedRule(),
        asked.append,
    )
    assert [(one.name, one.index, one.got, one.expected) for one in found.differences] == [
        ("bad", 7, right[7] + 1, right[7])
    ]
    assert asked == [1, 2, 3]


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ([b'{"error": {"message": "node-0 was lost", "type": "server_error"}}'], "node-0 was lost"),
        ([b'{"choices": []}', b"[DONE]"], "the stream ended without a token"),
    ],
)
async def test_an_answer_that_breaks_off_is_told(events: list[bytes], error: str) -> None:
    async def tokenize(request: web.Request) -> web.Response:
        return web.json_response({"tokens": [1, 2]})

    async def complete(request: web.Request) -> web.Response:
        body = b"".join(b"data: " + event + b"\n\n" for event in events)
        return web.Response(body=body, content_type="text/event-stream")

    app = web.Application()
    app.add_routes([web.post("/tokenize", tokenize), web.post("/v1/chat/completions", complete)])
    async with TestServer(app) as server, ClientSession() as session:
        turn = await Talk(session, str(server.make_url("")).rstrip("/"), "m", "b").ask("who?", last=True)
    assert turn.error == error


def test_an_answer_that_ends_early_differs_there() -> None:
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([1, 2], [1, 2]) is None


def test_the_demo_s_data_is_shipped() -> None:
    code = "from services.cli.demo.play import TRACE; print(TRACE)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert Path(shown.stdout.strip()).exists()
