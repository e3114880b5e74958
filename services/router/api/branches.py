"""`/v1/branches`: what is known of branches, and what a harness says about them."""

import re
import secrets
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from schemas.branch import LARGEST_VERSION, BranchEvent, BranchEventType
from schemas.codec import encode
from services.bus import BusError
from services.router.api.body import convert
from services.router.api.errors import ApiError
from services.router.core.failure import NOT_FOUND, Failure, invalid, unavailable
from services.router.core.identity import IdentityError, branch_id
from services.router.directory import DirectoryGone
from services.router.intake import Intake

SOURCE = "router"
_PARENTED = (BranchEventType.FORK, BranchEventType.SUBAGENT)
_LIMIT = 1000
_WHOLE = re.compile(r"[0-9]{1,20}\Z")


class BranchEventBody(msgspec.Struct):
    """`POST /v1/branches/{id}/events`."""

    type: str
    parent: str | None = None
    version: int | None = None
    event_id: str | None = None


class Branches:
    """Questions go to the directory, events into the stream."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    async def all(self, request: Request) -> Response:
        """`GET /v1/branches?limit=N`: newest first."""
        caller = self._intake.caller(request)
        text = request.query_params.get("limit", str(_LIMIT))
        if not _WHOLE.match(text) or not 0 < int(text) <= 100_000:
            raise ApiError(invalid(f"limit must be a whole number from 1 to 100000, got {text[:20]!r}", "limit"))
        found = await self._ask(caller.tenant, None, int(text))
        return JSONResponse({"branches": [msgspec.to_builtins(branch) for branch in found]})

    async def one(self, request: Request) -> Response:
        """`GET /v1/branches/{id}`."""
        caller = self._intake.caller(request)
        name = _branch(request.path_params["id"])
        found = await self._ask(caller.tenant, name, 1)
        if not found:
            raise ApiError(_not_known(name))
        return JSONResponse(msgspec.to_builtins(found[0]))

    async def event(self, request: Request) -> Response:
        """`POST /v1/branches/{id}/events`."""
        caller = self._intake.caller(request)
        name = _branch(request.path_params["id"])
        body = convert(await self._intake.body(request), BranchEventBody)
        kind = _kind(body.type)
        parent = None if body.parent is None else _branch(body.parent, "parent")
        if kind in _PARENTED and parent is None:
            raise ApiError(invalid(f"type {kind.value} needs parent", "parent"))
        if parent == name:
            raise ApiError(invalid(f"branch {name[:100]!r} cannot be its own parent", "parent"))
        if body.version is not None and not 0 <= body.version <= LARGEST_VERSION:
            raise ApiError(invalid(f"version must be from 0 to {LARGEST_VERSION}, got {body.version}", "version"))
        if body.event_id is not None and not 0 < len(body.event_id) <= 128:
            raise ApiError(invalid(f"event_id must have 1 to 128 characters, got {len(body.event_id)}", "event_id"))
        if kind in _PARENTED and parent is not None and not await self._ask(caller.tenant, parent, 1):
            raise ApiError(invalid(f"branch {parent[:100]!r}, named as parent, is not known", "parent"))
        return await self._store(caller.tenant, name, kind, parent, body)

    async def end(self, request: Request) -> Response:
        """`DELETE /v1/branches/{id}`; of a family too, which is known by its branches."""
        caller = self._intake.caller(request)
        name = _branch(request.path_params["id"])
        known = self._intake.knows(caller.tenant, name) or await self._ask(caller.tenant, name, 1)
        if not known and not any(branch.parent == name for branch in await self._ask(caller.tenant, None, _LIMIT)):
            raise ApiError(_not_known(name))
        return await self._store(caller.tenant, name, BranchEventType.END, None, BranchEventBody(type="end"))

    async def _store(
        self, tenant: str, name: str, kind: BranchEventType, parent: str | None, body: BranchEventBody
    ) -> Response:
        event = BranchEvent(
            id=body.event_id or f"http-{secrets.token_hex(12)}",
            t=self._intake.wall(),
            branch=name,
            type=kind,
            tenant=tenant,
            parent=parent,
            version=body.version,
            source=SOURCE,
        )
        subject = self._intake.subjects.branch_event(name, tenant)
        try:
            await self._intake.bus.store(subject, encode(event), event.id)
        except BusError as error:
            raise ApiError(unavailable(f"the event was not stored: {error}", "not_stored")) from error
        answer: dict[str, Any] = {"event_id": event.id, "branch": name, "type": kind.value}
        return JSONResponse(answer, status_code=202)

    async def _ask(self, tenant: str, branch: str | None, limit: int) -> list[Any]:
        try:
            return list(await self._intake.directory.branches(tenant, branch, limit))
        except DirectoryGone as error:
            raise ApiError(unavailable(str(error), "directory_unavailable")) from error


def _not_known(name: str) -> Failure:
    return Failure(404, NOT_FOUND, f"branch {name[:100]!r} is not known", "id", "branch_not_found")


def _branch(value: str, param: str = "id") -> str:
    try:
        return branch_id(value, param)
    except IdentityError as error:
        raise ApiError(invalid(str(error), error.param)) from error


def _kind(text: str) -> BranchEventType:
    said = [kind for kind in BranchEventType if kind is not BranchEventType.CONTEXT]
    found = next((kind for kind in said if kind.value == text), None)
    if found is None:
        raise ApiError(invalid(f"type must be one of {', '.join(said)}, got {text[:40]!r}", "type"))
    return found
