"""The router's HTTP routes, and what every call goes through: errors in the API's own shape, nothing leaked."""

from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from services.router.api.answer import AnswerResponse
from services.router.api.anthropic import Anthropic
from services.router.api.branches import Branches
from services.router.api.cluster import Cluster
from services.router.api.errors import (
    INTERNAL_FAILURE,
    ApiError,
    ErrorBody,
    anthropic_error,
    error_response,
    openai_error,
)
from services.router.api.generate import Generation
from services.router.api.openai import OpenAI
from services.router.api.requests import Requests
from services.router.api.responses import Responses
from services.router.api.tokens import Tokens
from services.router.core.failure import NOT_FOUND, Failure
from services.router.intake import Intake

if TYPE_CHECKING:
    from services.router.service import RouterService

Handler = Callable[[Request], Awaitable[Response | AnswerResponse]]
_CLIENT_GONE = 499
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


def http_routes(service: "RouterService") -> list[BaseRoute]:
    """Every route of the router but /health, /ready and /metrics."""
    intake = Intake(service)
    generation, branches, cluster = Generation(intake), Branches(intake), Cluster(service, intake)
    openai, anthropic, responses = OpenAI(generation), Anthropic(generation), Responses(generation)
    requests = Requests(intake, service)
    tokens, models = Tokens(intake, lambda: service.core.max_context_tokens), Models(intake)
    table: list[tuple[str, str, Handler]] = [
        ("POST", "/v1/chat/completions", openai.chat),
        ("POST", "/v1/completions", openai.completions),
        ("POST", "/v1/responses", responses.create),
        ("POST", "/v1/messages", anthropic.messages),
        ("POST", "/v1/messages/count_tokens", anthropic.count_tokens),
        ("GET", "/v1/models", models.all),
        ("GET", "/v1/models/{id:path}", models.one),
        ("POST", "/tokenize", tokens.tokenize),
        ("POST", "/detokenize", tokens.detokenize),
        ("GET", "/v1/branches", branches.all),
        ("GET", "/v1/prompt_breaks", Breaks(intake, service).all),
        ("GET", "/v1/requests", requests.all),
        ("GET", "/v1/requests/{id:path}", requests.one),
        ("POST", "/v1/branches/{id:path}/events", branches.event),
        ("GET", "/v1/branches/{id:path}", branches.one),
        ("DELETE", "/v1/branches/{id:path}", branches.end),
        ("GET", "/v1/cluster", cluster.show),
        ("POST", "/v1/cluster/split", cluster.order),
        ("GET", "/version", show_version),
    ]
    routes = [Route(path, guarded(service, handler), methods=[method]) for method, path, handler in table]
    return [*routes, Route("/v1/{rest:path}", guarded(service, unknown), methods=_METHODS)]


async def unknown(request: Request) -> Response:
    """Whatever else is asked for below /v1."""
    message = f"{request.method} {request.url.path[:200]} is not served here"
    raise ApiError(Failure(404, NOT_FOUND, message, code="unknown_route"))


def guarded(service: "RouterService", handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """`handler` with every failure turned into an answer; what nobody foresaw is logged and answered as 500."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)  # type: ignore[return-value] # an ASGI response is all that starlette asks for
        except ApiError as error:
            service.metrics.refused.labels(error.failure.status).inc()
            return error_response(error.failure, request.headers.get("x-request-id"), _shape_of(request))
        except ClientDisconnect:
            return Response(status_code=_CLIENT_GONE)
        except Exception as error:  # a call that fails ends with 500 and a log line, never the process
            service.metrics.refused.labels(INTERNAL_FAILURE.status).inc()
            service.app.log.error("call_failed", path=request.url.path, exc_info=error)
            return error_response(INTERNAL_FAILURE, request.headers.get("x-request-id"), _shape_of(request))

    return handle


def _shape_of(request: Request) -> ErrorBody:
    """Errors of Anthropic's API in its shape, all others in OpenAI's."""
    return anthropic_error if request.url.path.startswith("/v1/messages") else openai_error


class Breaks:
    """`GET /v1/prompt_breaks`: prompts that break at a changing token, newest first."""

    def __init__(self, intake: Intake, service: "RouterService") -> None:
        self._intake, self._service = intake, service

    async def all(self, request: Request) -> Response:
        found = self._service.breaks.listed(self._intake.caller(request).tenant)
        return JSONResponse({"breaks": [msgspec.to_builtins(each) for each in found]})


class Models:
    """`/v1/models`: the one model the cluster serves, with the fields of both APIs."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    async def all(self, request: Request) -> Response:
        self._intake.caller(request)
        model = self._model()
        page = {"has_more": False, "first_id": model["id"], "last_id": model["id"]}
        return JSONResponse({"object": "list", "data": [model], **page})

    async def one(self, request: Request) -> Response:
        self._intake.caller(request)
        wanted = request.path_params["id"]
        if wanted != self._intake.model_name():
            message = f"model {wanted[:100]!r} is not served here, {self._intake.model_name()!r} is"
            raise ApiError(Failure(404, NOT_FOUND, message, "model", "model_not_found"))
        return JSONResponse(self._model())

    def _model(self) -> dict[str, object]:
        name = self._intake.model_name()
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "type": "model",
            "display_name": name,
            "created_at": "1970-01-01T00:00:00Z",
            "owned_by": "evolving-infra",
            "max_model_len": self._intake.max_context_tokens(),
            "tools": self._tools(),
            "images": {"supported": self._intake.takes_images()},
        }

    def _tools(self) -> dict[str, object]:
        """Whether tools are taken, and whose template says them to the model; the parser once it is known."""
        formats = self._intake.formats
        tokenizer = self._intake.loaded_tokenizer()
        template = None if tokenizer is None else "model" if tokenizer.template.takes_tools else "default"
        return {"supported": formats.installed, "template": template, "parser": formats.known().tool_parser or None}


async def show_version(request: Request) -> Response:
    """`GET /version`."""
    return JSONResponse({"version": version("evolving-infra")})
