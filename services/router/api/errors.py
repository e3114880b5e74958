"""Failures on their way to a client: one exception, and the shape each API gives it."""

from typing import Any

from starlette.responses import JSONResponse, Response

from services.router.core.failure import INTERNAL, Failure

INTERNAL_FAILURE = Failure(500, INTERNAL, "the router failed to handle this request; its log says why")


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


def error_response(failure: Failure, request_id: str | None = None) -> Response:
    """A whole response for `failure`, with retry-after where it may help."""
    headers = {"x-request-id": request_id} if request_id else {}
    if failure.retry_after_s is not None:
        headers["retry-after"] = str(failure.retry_after_s)
    if failure.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(openai_error(failure), status_code=failure.status, headers=headers)
