"""Questions to the directory: short ones whose answer may be missing, and those people wait for."""

import asyncio

from schemas.branch import BranchInfo
from schemas.codec import RejectedMessage, encode
from schemas.directory import BRANCH_REPLY, MATCH_REPLY, BranchQuery, MatchQuery, MatchReply
from schemas.subjects import Subjects
from services.bus import Bus, BusError
from services.router.core.context import Context
from services.router.core.identity import Identity

_PATIENT_S = 2.0
_LOOP_LAG_S = 0.002


class DirectoryGone(Exception):
    """The directory did not answer a question that only it can answer."""


class DirectoryClient:
    """Speaks to the directory. `budget_s`: how long a match may take before the request goes on without.

    Time in which our own event loop was busy does not count against it: the answer may be here already. `router` of
    life `incarnation` is who asks.
    """

    def __init__(self, bus: Bus, subjects: Subjects, budget_s: float, router: str, incarnation: int) -> None:
        self._bus, self._subjects, self._budget_s = bus, subjects, budget_s
        self._router, self._incarnation = router, incarnation

    async def match(self, request: str, identity: Identity, context: Context) -> MatchReply | None:
        """Where the prefix of `context` lies; None when the directory keeps silent."""
        query = MatchQuery(
            request=request,
            hashes=context.keys(),
            prompt_tokens=context.tokens,
            branch=identity.branch,
            tenant=identity.tenant,
            version=identity.version,
            parent=identity.parent,
            kind=identity.kind,
            family=identity.family,
            compaction=identity.compaction,
            media=context.block_media(),
            router=self._router,
            incarnation=self._incarnation,
        )
        answer = asyncio.ensure_future(self._match(query, _PATIENT_S))
        loop = asyncio.get_running_loop()
        due = loop.time() + self._budget_s
        await asyncio.wait({answer}, timeout=self._budget_s)
        late_s = loop.time() - due
        if not answer.done() and late_s > _LOOP_LAG_S:
            await asyncio.wait({answer}, timeout=min(late_s, self._budget_s))
        if answer.done():
            return answer.result()
        answer.cancel()
        return None

    async def placed(self, request: str, node: str) -> None:
        """Tell where a pending prefix is being computed."""
        await self._match(MatchQuery(request=request, placed_node=node), _PATIENT_S)

    async def release(self, request: str) -> None:
        """Withdraw a pending prefix. If the directory does not hear it, its lease ends by itself."""
        await self._match(MatchQuery(request=request, release=True), _PATIENT_S)

    async def branches(self, tenant: str, branch: str | None, limit: int = 1000) -> list[BranchInfo]:
        """One branch or all of a tenant. DirectoryGone."""
        query = BranchQuery(branch=branch, tenant=tenant, limit=limit)
        verb = "branches" if branch is None else "branch"
        try:
            data = await self._bus.request(self._subjects.query_directory(verb), encode(query), _PATIENT_S)
            return BRANCH_REPLY.decode(data).branches
        except (BusError, RejectedMessage) as error:
            raise DirectoryGone(f"the directory does not answer: {error}") from error

    async def _match(self, query: MatchQuery, timeout_s: float) -> MatchReply | None:
        try:
            data = await self._bus.request(self._subjects.query_directory("match"), encode(query), timeout_s)
            return MATCH_REPLY.decode(data)
        except (BusError, RejectedMessage):
            return None
