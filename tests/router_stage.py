"""A router with its HTTP on a real socket, in front of timed engines: what the router's integration tests share."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from schemas.phase import Phase
from services.app import App
from services.bus import Bus, MemoryBus, MemoryHub
from services.router.service import RouterService
from services.router.settings import RouterSettings
from tests.engine_cluster import Running, service, settings_of, timed, until

Connect = Callable[[], Awaitable[Bus]]


def in_memory() -> Connect:
    """Buses of a hub of their own."""
    hub = MemoryHub()

    async def connect() -> Bus:
        return MemoryBus(hub)

    return connect


@dataclass
class Reply:
    """One HTTP answer; `events` are the data of its stream."""

    status: int
    headers: Mapping[str, str]
    body: Any
    events: list[Any] = field(default_factory=list)

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = self.body["error"]
        return found

    @property
    def tokens(self) -> list[int]:
        """Token ids of the answer, streamed or whole."""
        parts = self.events or [self.body]
        return [t for part in parts for choice in part.get("choices", []) for t in choice.get("token_ids") or []]

    @property
    def usage(self) -> dict[str, Any]:
        parts = self.events or [self.body]
        found = [part["usage"] for part in parts if part.get("usage")]
        assert found, f"no usage in {self.status} {self.body}"
        return dict(found[-1])

    @property
    def finish(self) -> str:
        parts = self.events or [self.body]
        reasons = [choice["finish_reason"] for part in parts for choice in part.get("choices", [])]
        return next(reason for reason in reversed(reasons) if reason)


class Stage:
    """A router `r0` and the engines started so far."""

    def __init__(self, connect: Connect, stack: AsyncExitStack) -> None:
        self.connect, self._stack = connect, stack
        self.engines: dict[str, Running] = {}
        self.router: RouterService
        self.url = ""
        self.http: aiohttp.ClientSession

    async def start(self, **settings: Any) -> None:
        """Start the router and an HTTP client for it."""
        keys = {"http_port": 0, "tokenizer": "byte", "log_level": "warning", "debug_checks": True, "drain_s": 2.0}
        keys |= {"node_timeout_s": 10.0}
        apps: list[App[RouterSettings]] = []

        def build(app: App[RouterSettings]) -> RouterService:
            apps.append(app)
            return RouterService(app)

        chosen = RouterSettings(**{**keys, **settings})
        running = await self._stack.enter_async_context(service(build, chosen, await self.connect()))
        self.router, self.running = running.service, running
        self.url = f"http://127.0.0.1:{apps[0].http_port}"
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=30)
        self.http = await self._stack.enter_async_context(aiohttp.ClientSession(connector=connector, timeout=timeout))

    async def engine(self, node: str, *, sleep: Any = None, phase: Phase = Phase.BOTH, **keys: Any) -> Running:
        """Start a timed engine without a pool and wait until the router would use it."""
        make = timed(sleep) if sleep is not None else timed()
        settings = settings_of(node, None, phase=phase, **keys)
        running = await self._stack.enter_async_context(service(make, settings, await self.connect()))
        self.engines[node] = running
        await until(lambda: self._usable(node))
        return running

    def _usable(self, node: str) -> bool:
        found = self.router.core.nodes.get(node)
        served = found is not None and any(found.serves(phase) for phase in (Phase.PREFILL, Phase.DECODE))
        return served and self.router.tokenizer is not None

    async def post(self, path: str, body: Any, **headers: str) -> Reply:
        """One call, read to its end; `body` as it stands if it is bytes."""
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        sent = {"content-type": "application/json"} | {key.replace("_", "-"): value for key, value in headers.items()}
        async with self.http.post(self.url + path, data=data, headers=sent) as response:
            text = await response.read()
            if response.content_type == "text/event-stream":
                return Reply(response.status, response.headers, text.decode(), events_of(text.decode()))
            return Reply(response.status, response.headers, json.loads(text))

    async def get(self, path: str, method: str = "GET", **headers: str) -> Reply:
        sent = {key.replace("_", "-"): value for key, value in headers.items()}
        async with self.http.request(method, self.url + path, headers=sent) as response:
            return Reply(response.status, response.headers, await response.json(content_type=None))

    async def complete(self, prompt: Any, tokens: int, *, branch: str | None = None, **body: Any) -> Reply:
        """A plain completion over token ids."""
        asked = {"prompt": prompt, "max_tokens": tokens, "return_token_ids": True, "ignore_eos": True, **body}
        headers = {"x_ei_branch_id": branch} if branch else {}
        return await self.post("/v1/completions", asked, **headers)

    def assert_nothing_held(self) -> None:
        """No request is open, nothing is booked anywhere."""
        core = self.router.core
        core.check()
        assert core.requests == {}
        assert core.ledger.booked() == {}

    async def settled(self, limit_s: float = 2.0) -> None:
        """Everything has ended here and in every engine."""
        await until(lambda: not self.router.core.requests, limit_s)
        self.assert_nothing_held()
        for running in self.engines.values():
            if not running.task.done():
                await until(lambda r=running: r.engine.runner.core.idle() and not r.backend.legs, limit_s)


def events_of(text: str) -> list[Any]:
    """The JSON documents of a stream of server-sent events, [DONE] left out."""
    lines = (line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: "))
    return [json.loads(line) for line in lines if line != "[DONE]"]


@asynccontextmanager
async def stage(connect: Connect, *nodes: str, path: Path | None = None, **settings: Any) -> AsyncIterator[Stage]:
    """A router and engines of these names, all serving both phases."""
    async with AsyncExitStack() as stack:
        made = Stage(connect, stack)
        await made.start(**settings)
        for node in nodes:
            await made.engine(node)
        yield made


async def drop_connection(stage: Stage, body: dict[str, Any], after: Callable[[], bool]) -> None:
    """Begin a completion and hang up as soon as `after` says so."""
    calling = asyncio.ensure_future(stage.post("/v1/completions", body))
    await until(after)
    calling.cancel()
    await asyncio.wait([calling])
