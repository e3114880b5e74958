"""Failures on their way to a client: one exception, and the shape each API gives it."""

from collections.abc import Callable
from typing import Any

from starlette.responses import JSONResponse, Response

from services.router.core.failure import INTERNAL, UNAVAILABLE, Failure

INTERNAL_FAILURE = Failure(500, INTERNAL, "the router failed to handle this request; its log says why")
_OVERLOADED = "overloaded_error"


class ApiError(Exception):
    """Ends the handling of a call with `failure`."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def openai_error(failure: Failure) -> dict[str, Any]:
    """The OpenAI error body."""
    return {
        "error": {
            "message": failure.message,
            "type": failure.kind,
            "param": failure.param,
            "code": failure.code,
        }
    }


def anthropic_error(failure: Failure) -> dict[str, Any]:
    """The Anthropic error body; it has no place for the field at fault, the message names it."""
    kind = _OVERLOADED if failure.kind == UNAVAILABLE else failure.kind
    return {"type": "error", "error": {"type": kind, "message": failure.message}}


ErrorBody = Callable[[Failure], dict[str, Any]]


def error_response(failure: Failure, request_id: str | None = None, body: ErrorBody = openai_error) -> Response:
    """A whole response for `failure`, with retry-after where it may help."""
    headers = {"x-request-id": request_id, "request-id": request_id} if request_id else {}
    if failure.retry_after_s is not None:
        headers["retry-after"] = str(failure.retry_after_s)
    if failure.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(body(failure), status_code=failure.status, headers=headers)


def shown(value: object, limit: int = 40) -> str:
    """A value as an error message quotes it."""
    try:
        text = repr(value)
    except ValueError:
        text = "a number of very many digits"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
