"""The life of a service: start, readiness, drain, crash; several services in one loop."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

import aiohttp
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from services.app import App, serve
from services.bus import Delivery, MemoryBus, MemoryHub
from services.settings import ServiceSettings


class DemoSettings(ServiceSettings, kw_only=True):
    service: ClassVar[str] = "demo"


class Demo:
    """A service that does what the test asks for."""

    def __init__(self, app: App[DemoSettings]) -> None:
        self.app = app
        self.calls: list[str] = []
        self.reasons: list[str] = []
        self.crash: Exception | None = None
        self.drained = asyncio.Event()
        self.drained.set()

    async def start(self) -> None:
        self.calls.append("start")
        await self.app.bus.respond("demo.echo", self._echo)
        self.app.tasks.create_task(self._loop())

    async def _echo(self, delivery: Delivery) -> bytes:
        return delivery.data

    async def _loop(self) -> None:
        while self.crash is None:
            await asyncio.sleep(0.005)
        raise self.crash

    def not_ready(self) -> list[str]:
        return self.reasons

    def routes(self) -> list[BaseRoute]:
        return [Route("/hello", self._hello)]

    async def _hello(self, request: Request) -> Response:
        return PlainTextResponse(f"hello from {self.app.settings.name}")

    async def drain(self) -> None:
        self.calls.append("drain")
        await self.drained.wait()

    async def stop(self) -> None:
        self.calls.append("stop")


class Running:
    """A service under test and the handles on it."""

    def __init__(self, hub: MemoryHub, settings: DemoSettings | None = None) -> None:
        self.bus = MemoryBus(hub)
        self.settings = settings or DemoSettings()
        self.stop, self.hurry, self.started = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.service: Demo
        self.task = asyncio.ensure_future(
            serve(
                self.build,
                self.settings,
                stop=self.stop,
                hurry=self.hurry,
                bus=self.bus,
                started=lambda _: self.started.set(),
            )
        )

    def build(self, app: App[DemoSettings]) -> Demo:
        self.service = Demo(app)
        return self.service

    async def up(self) -> "Running":
        async with asyncio.timeout(5):
            await self.started.wait()
        return self

    async def get(self, path: str) -> tuple[int, str]:
        url = f"http://127.0.0.1:{self.service.app.http_port}{path}"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            return answer.status, await answer.text()

    async def end(self) -> None:
        self.stop.set()
        await asyncio.wait_for(self.task, 5)


@asynccontextmanager
async def running(hub: MemoryHub, settings: DemoSettings | None = None) -> AsyncIterator[Running]:
    demo = Running(hub, settings)
    await demo.up()
    try:
        yield demo
    finally:
        demo.stop.set()
        demo.hurry.set()
        await asyncio.wait([demo.task])
        await demo.bus.close()


@pytest.fixture
def hub() -> MemoryHub:
    return MemoryHub()


async def test_serves_health_readiness_metrics_and_its_own_routes(hub: MemoryHub) -> None:
    async with running(hub) as demo:
        assert await demo.get("/health") == (200, "ok\n")
        status, ready = await demo.get("/ready")
        assert (status, json.loads(ready)) == (200, {"ready": True, "reasons": []})
        assert await demo.get("/hello") == (200, "hello from demo")
        _, metrics = await demo.get("/metrics")
        assert "ei_bus_connected_ratio 1.0" in metrics
        assert "process_resident_memory_bytes" in metrics
        status, missing = await demo.get("/nowhere")
        assert (status, json.loads(missing)["error"]["code"]) == (404, "unknown_route")


async def test_not_ready_names_every_reason(hub: MemoryHub) -> None:
    async with running(hub) as demo:
        demo.service.reasons = ["no node serves decode"]
        hub.down()
        status, ready = await demo.get("/ready")
        assert status == 503
        assert json.loads(ready)["reasons"] == ["no broker at nats://127.0.0.1:4222", "no node serves decode"]
        assert (await demo.get("/health"))[0] == 200


async def test_drains_then_stops_and_is_not_ready_meanwhile(hub: MemoryHub) -> None:
    async with running(hub) as demo:
        demo.service.drained.clear()
        demo.stop.set()
        async with asyncio.timeout(5):
            await demo.service.app.stopping.wait()
        status, ready = await demo.get("/ready")
        assert (status, json.loads(ready)["reasons"]) == (503, ["stopping"])
        assert await demo.get("/hello") == (200, "hello from demo")
        demo.service.drained.set()
        await asyncio.wait_for(demo.task, 5)
        assert demo.service.calls == ["start", "drain", "stop"]


async def test_a_drain_is_bounded(hub: MemoryHub) -> None:
    async with running(hub, DemoSettings(drain_s=0.05)) as demo:
        demo.service.drained.clear()
        await demo.end()
        assert demo.service.calls == ["start", "drain", "stop"]


async def test_a_second_signal_hurries(hub: MemoryHub) -> None:
    async with running(hub, DemoSettings(drain_s=600)) as demo:
        demo.service.drained.clear()
        demo.stop.set()
        async with asyncio.timeout(5):
            await demo.service.app.stopping.wait()
        demo.hurry.set()
        await asyncio.wait_for(demo.task, 2)
        assert demo.service.calls == ["start", "drain", "stop"]


async def test_a_crashed_task_ends_the_service_with_its_error(hub: MemoryHub) -> None:
    async with running(hub) as demo:
        demo.service.crash = AssertionError("count below zero")
        with pytest.raises(ExceptionGroup) as caught:
            await asyncio.wait_for(demo.task, 5)
        assert caught.group_contains(AssertionError, match="count below zero")
        assert demo.service.calls == ["start"]


async def test_a_failed_handler_ends_the_service(hub: MemoryHub) -> None:
    async with running(hub) as demo:

        async def handler(delivery: Delivery) -> None:
            raise AssertionError("handler broke an invariant")

        await demo.bus.subscribe("demo.x", handler)
        await demo.bus.publish("demo.x", b"")
        with pytest.raises(ExceptionGroup) as caught:
            await asyncio.wait_for(demo.task, 5)
        assert caught.group_contains(AssertionError, match="handler broke")


async def test_a_service_that_fails_to_start_fails(hub: MemoryHub) -> None:
    class Broken(Demo):
        async def start(self) -> None:
            raise ValueError("no model at /models/x")

    bus = MemoryBus(hub)
    with pytest.raises(ExceptionGroup) as caught:
        await serve(Broken, DemoSettings(), stop=asyncio.Event(), bus=bus)
    assert caught.group_contains(ValueError, match="no model at")
    await bus.close()


async def test_a_stop_during_a_long_start_cuts_it_short(hub: MemoryHub) -> None:
    calls: list[str] = []
    begun = asyncio.Event()

    class Slow(Demo):
        async def start(self) -> None:
            begun.set()
            await asyncio.sleep(600)

        async def stop(self) -> None:
            calls.append("stop")

    bus, stop = MemoryBus(hub), asyncio.Event()
    serving = asyncio.ensure_future(serve(Slow, DemoSettings(), stop=stop, bus=bus))
    await begun.wait()
    stop.set()
    await asyncio.wait_for(serving, 5)
    assert calls == ["stop"]
    await bus.close()


async def test_a_route_that_is_not_there_yet_is_unavailable_not_unknown(hub: MemoryHub) -> None:
    begun: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    class Slow(Demo):
        async def start(self) -> None:
            begun.set_result(self.app.http_port)
            await asyncio.sleep(600)

    bus, stop = MemoryBus(hub), asyncio.Event()
    serving = asyncio.ensure_future(serve(Slow, DemoSettings(), stop=stop, bus=bus))
    url = f"http://127.0.0.1:{await begun}/hello"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        error = (await answer.json())["error"]
        assert (answer.status, answer.headers["retry-after"], error["code"]) == (503, "1", "starting")
    stop.set()
    await asyncio.wait_for(serving, 5)
    await bus.close()


async def test_the_bound_port_is_published_and_withdrawn(hub: MemoryHub, tmp_path: Path) -> None:
    async with running(hub, DemoSettings(name="demo-1", ports_dir=str(tmp_path))) as demo:
        published = tmp_path / "demo-1.http"
        assert published.read_text() == f"{demo.service.app.http_port}\n"
        await demo.end()
        assert not published.exists()


async def test_a_taken_port_is_an_error_that_names_it(hub: MemoryHub) -> None:
    async with running(hub) as demo:
        port, bus = demo.service.app.http_port, MemoryBus(hub)
        with pytest.raises(OSError, match=f"in use.*127.0.0.1.*{port}"):
            await serve(Demo, DemoSettings(http_port=port), stop=asyncio.Event(), bus=bus)
        await bus.close()


async def test_several_services_share_a_loop_but_no_metrics(hub: MemoryHub) -> None:
    async with running(hub, DemoSettings(name="a")) as one, running(hub, DemoSettings(name="b")) as two:
        one.service.app.metrics.counter("things_total", "Things").inc()
        assert "ei_demo_things_total 1.0" in (await one.get("/metrics"))[1]
        assert "ei_demo_things_total" not in (await two.get("/metrics"))[1]
        await one.end()
        assert await two.get("/hello") == (200, "hello from b")


@pytest.mark.parametrize("verb", ["PING", "INFO", "STATS"])
@pytest.mark.parametrize("form", ["$SRV.{}", "$SRV.{}.ei-demo"])
async def test_answers_the_nats_services_protocol(hub: MemoryHub, verb: str, form: str) -> None:
    async with running(hub) as demo:
        asker = MemoryBus(hub)
        await asker.request("demo.echo", b"x", 1)
        answer = json.loads(await asker.request(form.format(verb), b"", 1))
        assert answer["type"] == f"io.nats.micro.v1.{verb.lower()}_response"
        assert (answer["name"], answer["metadata"]["name"]) == ("ei-demo", "demo")
        if verb == "INFO":
            assert [e["subject"] for e in answer["endpoints"]] == ["demo.echo"]
        if verb == "STATS":
            assert [e["num_requests"] for e in answer["endpoints"]] == [1]
        again = json.loads(await asker.request(f"$SRV.PING.ei-demo.{answer['id']}", b"", 1))
        assert again["id"] == answer["id"]
        await asker.close()
        assert demo.service.calls == ["start"]
