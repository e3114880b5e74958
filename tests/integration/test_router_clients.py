"""Clients that wait, stall or stay away, and a broker that goes: what the router does for each."""

import asyncio
import socket
from typing import Any

import aiohttp
import pytest

from services import http_server
from services.broker import Broker
from tests.conftest import Connect as Connections
from tests.engine_cluster import Gate, until
from tests.integration.test_router_failures import body, right_answer, slowly
from tests.router_stage import Connect, Stage, events_of, in_memory, stage

PROMPT = list(range(65, 105))


@pytest.fixture
def memory() -> Connect:
    return in_memory()


async def metric(s: Stage, line: str) -> bool:
    async with s.http.get(s.url + "/metrics") as response:
        return line in (await response.text()).splitlines()


async def test_long_prefill_is_kept_alive_by_comments(memory: Connect) -> None:
    async with stage(memory, keep_alive_s=0.05) as s:
        gate = Gate(1)
        await s.engine("n1", sleep=gate.sleep)
        async with s.http.post(s.url + "/v1/completions", json=body(3)) as response:
            assert response.headers["x-ei-prefill-node"] == "n1"
            first = await response.content.readline()
            assert first == b": keep-alive\n"
            gate.open()
            rest = (await response.read()).decode()
        assert rest.endswith("data: [DONE]\n\n")
        await s.settled()


def with_small_buffers(monkeypatch: pytest.MonkeyPatch) -> aiohttp.TCPConnector:
    """Of the router's connections and of those the connector makes."""
    listen = socket.create_server

    def create_server(*arguments: Any, **more: Any) -> socket.socket:
        found = listen(*arguments, **more)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return found

    def connection(address: Any) -> socket.socket:
        family, kind, protocol, *_ = address
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        return found

    monkeypatch.setattr(http_server.socket, "create_server", create_server)
    return aiohttp.TCPConnector(socket_factory=connection)


async def test_a_client_that_reads_late_gets_every_token_in_order(
    memory: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await right_answer(1000)
    connector = with_small_buffers(monkeypatch)
    async with stage(memory, "n1") as s, aiohttp.ClientSession(connector=connector, read_bufsize=1024) as http:
        async with http.post(s.url + "/v1/completions", json=body(1000)) as response:
            calls = s.router.dispatcher.calls
            await until(lambda: any(call.backlog_bytes > 20_000 for call in calls.values()), 20.0)
            events = events_of(await response.text())
        tokens = [t for event in events for choice in event["choices"] for t in choice.get("token_ids") or []]
        assert tokens == expected
        await s.settled()


async def test_a_client_that_never_reads_is_cancelled(memory: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    connector = with_small_buffers(monkeypatch)
    async with (
        stage(memory, "n1", client_backlog_bytes=20_000) as s,
        aiohttp.ClientSession(connector=connector, read_bufsize=1024) as http,
        http.post(s.url + "/v1/completions", json=body(1000)),
    ):
        await until(lambda: not s.router.core.requests, 20.0)
        assert await metric(s, 'ei_router_clients_cancelled_total{reason="backlog"} 1.0')
        await s.settled()


async def test_silent_directory_is_not_waited_for(memory: Connect) -> None:
    async with stage(memory, "n1", "n2") as s:
        first = await s.complete(PROMPT, 9, branch="b")
        again = await s.complete(PROMPT + first.tokens + [5] * 8, 2, branch="b")
        assert again.headers["x-ei-prefill-node"] == first.headers["x-ei-prefill-node"]
        assert int(again.headers["x-ei-cached-tokens"]) == 48
        assert again.usage["prompt_tokens_details"]["cached_tokens"] == 48
        assert await metric(s, "ei_router_blind_total 2.0")


async def test_broker_gone_means_503_and_back_means_served(broker: Broker, nats_connect: Connections) -> None:
    url = broker.start()
    async with stage(lambda: nats_connect(url), "n1") as s:
        assert (await s.complete(PROMPT, 2)).status == 200
        broker.kill()
        loop = asyncio.get_running_loop()
        begun = loop.time()
        refused = await s.complete(PROMPT, 2)
        assert (refused.status, refused.error["code"]) == (503, "broker_unavailable")
        assert loop.time() - begun < 4.0
        broker.start()
        await until(lambda: s.router.app.bus.connected, 10.0)
        async with asyncio.timeout(10):
            while (await s.complete(PROMPT, 2)).status != 200:
                await asyncio.sleep(0.1)


async def test_running_stream_goes_on_after_the_broker_is_back(broker: Broker, nats_connect: Connections) -> None:
    expected = await right_answer(100)
    url = broker.start()
    async with stage(lambda: nats_connect(url)) as s:
        await s.engine("n1", sleep=slowly(0.02))
        calling = asyncio.ensure_future(s.post("/v1/completions", body(100)))
        await until(lambda: any(len(r.answer) > 10 for r in s.router.core.requests.values()))
        broker.kill()
        await asyncio.sleep(0.5)
        broker.start()
        reply = await calling
        assert reply.tokens == expected
        assert reply.finish == "length"
        await s.settled(8.0)


@pytest.mark.parametrize("end", [b"\r\n\r\n", b""])
async def test_a_head_without_bounds_is_refused(end: bytes) -> None:
    async with stage(in_memory(), "n0") as s:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(s.url.rpartition(":")[2]))
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-padding: " + b"a" * (2 << 20) + end)
        answer = await asyncio.wait_for(reader.read(4096), 5)
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b"the limit is 65536 bytes" in answer
        writer.close()
        assert (await s.get("/v1/models", x_padding="a" * 60_000)).status == 200
