"""The HTTP side of a service: health, readiness, metrics, and the routes of the service."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from structlog.typing import FilteringBoundLogger

from services.http_head import BoundedHeads
from services.settings import ServiceSettings

_BACKLOG = 2048
IDLE_S = 75
"""So long a connection may be idle: longer than clients keep theirs, or some would send as the server hangs up."""


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: signals belong to the app."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Listens from the first moment; `not_ready` says what /ready answers, routes may be added later."""

    def __init__(self, settings: ServiceSettings, log: FilteringBoundLogger) -> None:
        self.registry = CollectorRegistry()
        self.not_ready: Callable[[], list[str]] = lambda: ["starting"]
        self.port = 0
        self._settings, self._log = settings, log
        self._app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/ready", self._ready),
                Route("/metrics", self._metrics),
            ],
            exception_handlers={HTTPException: self._refused},
        )
        self._complete = False
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._socket: socket.socket | None = None

    def add(self, routes: Sequence[BaseRoute]) -> None:
        """Serve these too; until then every path but our own is answered 503, not 404."""
        self._app.router.routes.extend(routes)
        self._complete = True

    async def start(self) -> None:
        """Bind and listen; OSError when the port is taken."""
        settings = self._settings
        self._socket = socket.create_server((settings.http_host, settings.http_port), backlog=_BACKLOG)
        self.port = self._socket.getsockname()[1]
        config = uvicorn.Config(
            self._app,
            http=BoundedHeads,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            loop="none",
            server_header=False,
            timeout_keep_alive=IDLE_S,
        )
        self._server = _Server(config)
        self._task = asyncio.get_running_loop().create_task(self._server.serve([self._socket]), name="http")
        if settings.ports_dir:
            target = Path(settings.ports_dir) / f"{settings.name}.http"
            partial = target.with_suffix(".partial")
            partial.write_text(f"{self.port}\n")
            partial.rename(target)
        self._log.info("http_listening", host=settings.http_host, port=self.port)

    async def stop(self, grace_s: float) -> None:
        """Stop listening; running answers get `grace_s` to end."""
        if self._server is None or self._task is None or self._socket is None:
            return
        self._server.config.timeout_graceful_shutdown = max(1, round(grace_s)) if grace_s else None
        self._server.force_exit = not grace_s
        self._server.should_exit = True
        await self._task
        self._socket.close()
        if self._settings.ports_dir:
            (Path(self._settings.ports_dir) / f"{self._settings.name}.http").unlink(missing_ok=True)

    async def _refused(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if not self._complete and error.status_code == 404:
            message = f"{self._settings.name} is starting: {', '.join(self.not_ready())}"
            return _error(503, message, "service_unavailable", "starting", {"retry-after": "1"})
        where = f"{request.method[:20]} {request.url.path[:200]}"
        if error.status_code == 404:
            return _error(404, f"{where} is not served here", "not_found_error", "unknown_route")
        return _error(error.status_code, f"{where}: {error.detail}", "invalid_request_error", None, error.headers)

    async def _health(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _ready(self, request: Request) -> Response:
        reasons = self.not_ready()
        return JSONResponse({"ready": not reasons, "reasons": reasons}, status_code=503 if reasons else 200)

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)


def _error(
    status: int, message: str, kind: str, code: str | None, headers: Mapping[str, str] | None = None
) -> Response:
    """An error in the shape of the OpenAI API, which is the shape of all our errors."""
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return JSONResponse(body, status_code=status, headers=headers)
