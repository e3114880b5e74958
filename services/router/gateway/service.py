"""The gateway: every call goes to the upstream as it came, and its answer back as it comes; branches are noted by the
way. Nothing a harness sends is refused here, and nothing waits for the broker."""

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from string import punctuation
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from structlog.typing import FilteringBoundLogger
from yarl import URL

from services.clock import Clock
from services.router.core.identity import Identity, IdentityError, identify
from services.router.core.stability import Break, Stability
from services.router.gateway.conversations import Conversations, Observation, Said
from services.router.gateway.parts import parts_of

_HOP_BY_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
        *("transfer-encoding", "upgrade", "host", "content-length"),
    }
)
_ADDED = frozenset({"Accept", "Accept-Encoding", "User-Agent", "Content-Type"})
"""What the library would say of its own accord."""
_CLIENT_GONE = 499
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]
_LARGEST_READ = 64 << 20
_UNIT = "utf-32-le"
_SHOWN_CHARACTERS = 60


class Gateway:
    """`publish` takes the events; None: they are only logged. `upstream` may end with the `/v1` of calls."""

    def __init__(
        self, upstream: str, log: FilteringBoundLogger, clock: Clock, publish: Callable[[Said], None] | None
    ) -> None:
        self.upstream = upstream.rstrip("/").removesuffix("/v1")
        self._log, self._clock, self._publish = log, clock, publish
        self.conversations, self._stability = Conversations(), Stability()
        self.breaks: dict[str, dict[str, Any]] = {}
        self._session: aiohttp.ClientSession | None = None

    def app(self) -> Starlette:
        """Our own pages are below /gateway; every other path belongs to the upstream."""
        return Starlette(
            routes=[
                Route("/gateway/health", self._health),
                Route("/gateway/branches", self._branches),
                Route("/{path:path}", self._forward, methods=_METHODS),
            ]
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"upstream": self.upstream, "publishing": self._publish is not None})

    async def _branches(self, request: Request) -> Response:
        """Branches newest first, with the share of each prompt that came back at the front of the next one."""
        now = self._clock.now()
        return JSONResponse(
            {
                "branches": [
                    {
                        "id": found.branch,
                        "parent": found.parent,
                        "kind": found.kind,
                        "version": found.version,
                        "inferred": found.inferred,
                        "dialect": found.dialect,
                        "ended": found.ended,
                        "requests": found.requests,
                        "side_requests": found.side_requests,
                        "characters": found.last.characters[-1] if found.last.characters else 0,
                        "prefix_stability": found.stability,
                        "silent_s": now - found.seen,
                        "break": self.breaks.get(found.branch),
                    }
                    for found in self.conversations.listed()
                ]
            }
        )

    async def _forward(self, request: Request) -> Response:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
                connector=aiohttp.TCPConnector(limit=0),
            )
        try:
            body = await request.body()
        except ClientDisconnect:
            return Response(status_code=_CLIENT_GONE)
        seen = self._seen(request, body)
        try:
            answer = await self._asked(self._session, request, body)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            text = f"the upstream {self.upstream} cannot be reached: {error or type(error).__name__}"
            shape = {"error": {"message": text, "type": "service_unavailable", "param": None, "code": "no_upstream"}}
            return JSONResponse({"type": "error", **shape}, status_code=502)
        if answer is None:
            return Response(status_code=_CLIENT_GONE)
        response = StreamingResponse(_chunks(answer), status_code=answer.status)
        response.raw_headers = [
            (key.lower(), value)
            for key, value in answer.raw_headers
            if key.decode("latin-1").lower() not in _HOP_BY_HOP - {"content-length"}
        ]
        if seen is not None:
            response.headers["x-ei-branch-id"] = seen.conversation.branch.encode("ascii", "replace").decode()
        return response

    async def _asked(
        self, session: aiohttp.ClientSession, request: Request, body: bytes
    ) -> aiohttp.ClientResponse | None:
        """The upstream's answer once it begins; None when the client is gone before that, as the upstream sees too."""
        query = request.scope["query_string"]
        path = quote(request.scope["raw_path"] + (b"?" + query if query else b""), safe=punctuation)
        headers = [(key, value) for key, value in request.headers.items() if key not in _HOP_BY_HOP]
        asking = asyncio.ensure_future(
            session.request(
                request.method,
                URL(f"{self.upstream}{path}", encoded=True),
                data=body or None,
                headers=headers,
                allow_redirects=False,
                skip_auto_headers=_ADDED,
            )
        )
        watching = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait((asking, watching), return_when=asyncio.FIRST_COMPLETED)
            return await asking if asking.done() else None
        finally:
            for task in (asking, watching):
                task.cancel()

    def _seen(self, request: Request, body: bytes) -> Observation | None:
        """Note whose request it is. A body that cannot be read, or has no prompt, is none of our business."""
        raw = _json(body, request.headers.get("content-encoding", ""))
        parts = parts_of(raw) if raw is not None and request.method == "POST" else []
        if raw is None or not parts or request.url.path.endswith("/count_tokens"):
            return None
        try:
            identity = identify("", request.headers, raw)
        except IdentityError as error:
            self._log.warning("unusable_identity", error=str(error))
            identity = Identity("")
        found = self.conversations.observe(identity, parts, self._clock.now())
        for event in found.events:
            self._log.info(
                "branch_event", branch=event.branch, type=event.type, parent=event.parent, version=event.version
            )
            if self._publish is not None:
                self._publish(event)
        self._note_break(identity, found.conversation.branch, parts)
        return found

    def _note_break(self, identity: Identity, branch: str, parts: list[str]) -> None:
        packed = "\n".join(parts).encode(_UNIT, "surrogatepass")
        found = self._stability.observe(("", identity.branch or identity.family), packed)
        if found is not None:
            said = _shown(found)
            self.breaks[branch] = said
            while len(self.breaks) > self.conversations.capacity:
                del self.breaks[next(iter(self.breaks))]
            self._log.warning("prompt_breaks", branch=branch, **said)


async def _gone(request: Request) -> None:
    """Returns when the client hangs up; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _chunks(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The answer as it comes; the upstream is hung up on when the client is gone."""
    try:
        async for chunk in answer.content.iter_any():
            yield chunk
    finally:
        answer.close()


def _shown(found: Break) -> dict[str, Any]:
    """`position` in characters of the prompt's JSON parts."""
    words = [packed.decode(_UNIT, "replace")[:_SHOWN_CHARACTERS] for packed in (found.before, found.now)]
    return {"position": found.position, "before": words[0], "now": words[1]}


def _json(body: bytes, encoding: str) -> Mapping[str, Any] | None:
    try:
        if encoding == "gzip":
            body = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(body, _LARGEST_READ)
        elif encoding:
            return None
        return msgspec.json.decode(body, type=dict[str, Any]) if body and len(body) <= _LARGEST_READ else None
    except (msgspec.MsgspecError, zlib.error, RecursionError, UnicodeDecodeError):
        return None
