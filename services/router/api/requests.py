"""`/v1/requests`: requests that ended lately, with the cause of every token that was computed."""

from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from services.router.api.errors import ApiError
from services.router.core.failure import NOT_FOUND, Failure, invalid
from services.router.intake import Intake

if TYPE_CHECKING:
    from services.router.service import RouterService

_LIMIT = 100


class Requests:
    """What this router remembers of them; another router's are not here."""

    def __init__(self, intake: Intake, service: "RouterService") -> None:
        self._intake, self._service = intake, service

    async def one(self, request: Request) -> Response:
        """`GET /v1/requests/{id}`: by the id of the call or the router's own."""
        tenant, name = self._intake.caller(request).tenant, request.path_params["id"]
        found = self._service.dispatcher.recent.find(tenant, name)
        if found is None:
            raise ApiError(Failure(404, NOT_FOUND, f"request {name[:100]!r} is not known", "id", "unknown_request"))
        return JSONResponse(msgspec.to_builtins(found))

    async def all(self, request: Request) -> Response:
        """`GET /v1/requests?branch=ID`: the last ones of a branch, newest first."""
        tenant, branch = self._intake.caller(request).tenant, request.query_params.get("branch", "")
        if not branch:
            raise ApiError(invalid("branch must name a branch", "branch"))
        found = self._service.dispatcher.recent.of_branch(tenant, branch, _LIMIT)
        return JSONResponse({"requests": [msgspec.to_builtins(each) for each in found]})
