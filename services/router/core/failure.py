"""Why a request was not answered, in words every API shape can carry."""

import math
from dataclasses import dataclass

INVALID = "invalid_request_error"
AUTHENTICATION = "authentication_error"
PERMISSION = "permission_error"
NOT_FOUND = "not_found_error"
TOO_LARGE = "request_too_large"
RATE_LIMIT = "rate_limit_error"
UNAVAILABLE = "service_unavailable"
INTERNAL = "api_error"


@dataclass(frozen=True, slots=True)
class Failure:
    """An HTTP status, an error type and a message that names value and limit; `param` is the field at fault."""

    status: int
    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None


def invalid(message: str, param: str | None = None, code: str | None = None) -> Failure:
    """A field of the request is wrong: 400."""
    return Failure(400, INVALID, message, param, code)


def unavailable(message: str, code: str, retry_after_s: float = 1.0) -> Failure:
    """The cluster cannot serve this now, it may later: 503 with retry-after in whole seconds."""
    return Failure(503, UNAVAILABLE, message, None, code, max(1, math.ceil(retry_after_s)))


def limited(message: str, code: str, retry_after_s: float = 1.0) -> Failure:
    """A limit is reached: 429 with retry-after in whole seconds."""
    return Failure(429, RATE_LIMIT, message, None, code, max(1, math.ceil(retry_after_s)))
