"""The gateway as a process in front of a server that is not ours: untouched streams, branches, broken upstreams."""

import asyncio
import gzip
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from schemas.branch import BranchEvent, decode_branch_event
from schemas.streams import branch_stream
from schemas.subjects import Subjects
from services.bus import Delivery
from tests.cluster import free_port
from tests.conftest import Connect
from tests.engine_cluster import until

S = Subjects()
CHUNKS = [b'data: {"choices":[{"delta":{"content":"h\xc3\xa9"}}]}\n\n', b": keep-alive\n\n", b"data: [DONE]\n\n"]


class Upstream:
    """A server with an OpenAI-like API; `calls` are (method, path with query, headers, body) as they came."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, Any, bytes]] = []
        self.paths: list[str] = []
        self.asked, self.hung_up = asyncio.Event(), asyncio.Event()
        self.port = free_port()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.calls.append((request.method, request.path_qs, request.headers.copy(), body))
        self.paths.append(request.raw_path)
        self.asked.set()
        if request.path.endswith("/silent"):
            try:
                await asyncio.sleep(60)
            finally:
                self.hung_up.set()
        if request.path.endswith("/models"):
            return web.json_response({"object": "list"}, headers={"x-upstream": "yes"}, status=200)
        if request.path.endswith("/refused"):
            return web.json_response({"error": {"message": "no"}}, status=429, headers={"retry-after": "7"})
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "x-accel-buffering": "no"})
        await response.prepare(request)
        try:
            for chunk in CHUNKS:
                await response.write(chunk)
                await asyncio.sleep(0.01)
            while request.path.endswith("/endless"):
                await response.write(CHUNKS[1])
                await asyncio.sleep(0.01)
        except (ConnectionError, asyncio.CancelledError):
            self.hung_up.set()
            raise
        return response


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    made = Upstream()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.handle)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", made.port).start()
    yield made
    await runner.cleanup()


class Running:
    """A gateway process."""

    def __init__(self, upstream: int, *arguments: str, base: str = "") -> None:
        self.port = free_port()
        command = ["gateway", "--upstream", f"http://127.0.0.1:{upstream}{base}", "--port", str(self.port), *arguments]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services.cli.main", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.url = f"http://127.0.0.1:{self.port}"

    async def ready(self, http: aiohttp.ClientSession) -> None:
        deadline = time.monotonic() + 30
        while True:
            try:
                async with http.get(f"{self.url}/gateway/health") as response:
                    assert response.status == 200
                    return
            except aiohttp.ClientError:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)

    def stop(self) -> None:
        self.process.terminate()
        assert self.process.wait(20) in (0, -15)


async def branches(http: aiohttp.ClientSession, url: str) -> list[dict[str, Any]]:
    async with http.get(f"{url}/gateway/branches") as response:
        found: list[dict[str, Any]] = (await response.json())["branches"]
        return found


def chat(*texts: str, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text} for text in texts], **fields}


async def test_a_stream_passes_untouched_and_its_branch_is_seen(upstream: Upstream) -> None:
    running = Running(upstream.port)
    async with aiohttp.ClientSession() as http:
        try:
            await running.ready(http)
            body = json.dumps(chat("hello", stream=True), indent=2).encode()
            sent = {"content-type": "application/json", "x-session-id": "f", "authorization": "Bearer secret"}
            async with http.post(f"{running.url}/v1/chat/completions?beta=true", data=body, headers=sent) as response:
                assert await response.read() == b"".join(CHUNKS)
                assert response.headers["content-type"] == "text/event-stream"
                named = response.headers["x-ei-branch-id"]
            method, path, headers, arrived = upstream.calls[0]
            assert (method, path, arrived) == ("POST", "/v1/chat/completions?beta=true", body)
            assert (headers["authorization"], headers["x-session-id"]) == ("Bearer secret", "f")
            (found,) = await branches(http, running.url)
            assert (found["id"], found["dialect"], found["requests"]) == (named, "session-header", 1)

            async with http.get(f"{running.url}/v1/models") as response:
                assert (await response.json(), response.headers["x-upstream"]) == ({"object": "list"}, "yes")
            async with http.post(f"{running.url}/v1/refused", data=b"\xff not json") as response:
                assert (response.status, response.headers["retry-after"]) == (429, "7")
            packed = gzip.compress(json.dumps(chat("zipped", branch={"id": "z"})).encode())
            async with http.post(f"{running.url}/v1/x", data=packed, headers={"content-encoding": "gzip"}) as response:
                await response.read()
            assert (upstream.calls[-1][2]["content-encoding"], upstream.calls[-1][3]) == (
                "gzip",
                gzip.decompress(packed),
            )
            assert (await branches(http, running.url))[0]["id"] == "z"

            async with http.post(f"{running.url}/v1/endless", json=chat("x")) as response:
                await response.content.readany()
            await asyncio.wait_for(upstream.hung_up.wait(), 10)
        finally:
            running.stop()


async def test_branch_events_reach_the_broker_and_a_changing_head_is_reported(
    upstream: Upstream, nats_url: str, nats_connect: Connect
) -> None:
    bus = await nats_connect(nats_url)
    stream = branch_stream(S)
    await bus.ensure_stream(stream.name, stream.subjects, max_age_s=3600)
    heard: list[BranchEvent] = []

    async def hear(delivery: Delivery) -> None:
        heard.append(decode_branch_event(delivery.data, delivery.headers, delivery.subject))

    await bus.follow(S.branch_events(), hear, start="all")
    running = Running(upstream.port, "--nats", nats_url)
    async with aiohttp.ClientSession() as http:
        try:
            await running.ready(http)
            claude = {"x-claude-code-session-id": "s"}
            tools = [{"name": "Bash"}]
            rest = "rules that stay the same " * 20
            for turn in range(3):
                body = chat(*["hello"] * (1 + 2 * turn), tools=tools, system=f"checksum {turn}; {rest}")
                async with http.post(f"{running.url}/v1/messages", json=body, headers=claude) as response:
                    assert response.status == 200
            agent = claude | {"x-claude-code-agent-id": "a"}
            async with http.post(f"{running.url}/v1/messages", json=chat("child", tools=tools), headers=agent):
                pass
            await until(lambda: len(heard) >= 2)
            assert [(event.branch, event.type.value, event.parent) for event in heard][::2][0] == ("s", "open", None)
            assert ("s/a", "subagent", "s") in [(event.branch, event.type.value, event.parent) for event in heard]
            main = next(found for found in await branches(http, running.url) if found["id"] == "s")
            assert (main["break"]["before"], main["break"]["now"]) == ("1", "2")
        finally:
            running.stop()


async def test_an_upstream_that_is_away_is_a_502_that_says_so() -> None:
    running = Running(free_port(), "--nats", "nats://127.0.0.1:1")
    async with aiohttp.ClientSession() as http:
        try:
            await running.ready(http)
            async with http.post(f"{running.url}/v1/chat/completions", json=chat("hello")) as response:
                assert response.status == 502
                assert "cannot be reached" in (await response.json())["error"]["message"]
        finally:
            running.stop()


async def raw(port: int, sent: bytes) -> bytes:
    """What comes back over a connection of its own until the gateway closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return answer


async def test_neither_a_call_nor_its_answer_gets_anything_that_was_not_in_it(upstream: Upstream) -> None:
    running = Running(upstream.port)
    path = "/v1/models/a%2Fb%20c/models?x=%20y&z=a+b&q=%C3%B6&r=[1]"
    async with aiohttp.ClientSession() as http:
        try:
            await running.ready(http)
            answer = await raw(running.port, f"GET {path} HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n".encode())
            assert upstream.paths == [path]
            assert set(upstream.calls[0][2]) == {"Host"}
            head, _, body = answer.partition(b"\r\n\r\n")
            names = [line.partition(b":")[0].lower() for line in head.split(b"\r\n")[1:]]
            assert sorted(names) == sorted(set(names)), names
            assert (b"content-length", body) == (names[names.index(b"content-length")], b'{"object": "list"}')
            assert b"uvicorn" not in head
        finally:
            running.stop()


async def test_an_upstream_is_hung_up_on_as_soon_as_the_client_is_gone(upstream: Upstream) -> None:
    running = Running(upstream.port)
    async with aiohttp.ClientSession() as http:
        try:
            await running.ready(http)
            calling = asyncio.ensure_future(http.post(f"{running.url}/v1/silent", json=chat("x")))
            await asyncio.wait_for(upstream.asked.wait(), 10)
            calling.cancel()
            await asyncio.wait_for(upstream.hung_up.wait(), 10)
        finally:
            running.stop()


async def test_offers_of_http_2_and_ids_as_long_as_they_may_be_are_served(upstream: Upstream, nats_url: str) -> None:
    running = Running(upstream.port, "--nats", nats_url)
    body = json.dumps(chat("hello")).encode()
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
    ends = b"GET /gateway/health HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n"
    async with aiohttp.ClientSession() as http:
        try:
            await running.ready(http)
            head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n%b\r\n" % (len(body), offer)
            answer = await raw(running.port, head + body + ends)
            assert answer.count(b"HTTP/1.1 200") == 2, answer
            assert upstream.calls[0][3] == body
            family = {"x-session-id": "f" * 256}
            async with http.post(f"{running.url}/v1/chat/completions", json=chat("x"), headers=family) as response:
                assert response.status == 200
                assert len(response.headers["x-ei-branch-id"]) <= 256
        finally:
            running.stop()


async def test_an_upstream_may_be_given_as_the_base_url_that_clients_are_given(upstream: Upstream) -> None:
    running = Running(upstream.port, base="/v1/")
    async with aiohttp.ClientSession() as http:
        try:
            await running.ready(http)
            async with http.get(f"{running.url}/v1/models") as response:
                assert response.status == 200
            assert upstream.paths == ["/v1/models"]
        finally:
            running.stop()


@pytest.mark.parametrize("upstream_url", ["foo", "http://", "http:///v1", "nats://127.0.0.1:4222"])
def test_what_is_no_http_address_is_refused_at_once(upstream_url: str) -> None:
    command = [sys.executable, "-m", "services.cli.main", "gateway", "--upstream", upstream_url, "--port", "0"]
    done = subprocess.run(command, capture_output=True, timeout=20, check=False)
    assert done.returncode == 2
    assert b"is no http address" in done.stderr
