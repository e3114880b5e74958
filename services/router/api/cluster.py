"""`/v1/cluster`: nodes, split, last decision; and orders for another split."""

from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from schemas.codec import RejectedMessage
from schemas.phase import Phase, PlannerQuery, Split
from services.bus import BusError
from services.planner_order import OrderLost, order_switch
from services.router.api.body import convert
from services.router.api.errors import ApiError, shown
from services.router.core.failure import Failure, invalid, unavailable
from services.router.core.nodes import Node
from services.router.intake import Intake
from services.router.keys import may_order

if TYPE_CHECKING:
    from services.router.service import RouterService

_SWITCH_S = 900.0


class SplitBody(msgspec.Struct):
    """`POST /v1/cluster/split`."""

    split: str
    reason: str = "HTTP"


class Cluster:
    """What this router sees of the cluster."""

    def __init__(self, service: "RouterService", intake: Intake) -> None:
        self._service, self._intake = service, intake

    async def show(self, request: Request) -> Response:
        """`GET /v1/cluster`."""
        self._intake.caller(request)
        core, now = self._service.core, self._service.dispatcher.now
        nodes = sorted(core.nodes, key=lambda node: node.name)
        live = [node for node in nodes if core.nodes.alive(node.name, now) and not node.refusal]
        decision = self._service.decision
        return JSONResponse(
            {
                "split": str(split_of(live)),
                "nodes": [self._node(node, now) for node in nodes],
                "models": sorted({node.hello.model for node in nodes if node.hello and not node.refusal}),
                "open_requests": len(core.requests),
                "decision": None if decision is None else msgspec.to_builtins(decision),
            }
        )

    async def order(self, request: Request) -> Response:
        """`POST /v1/cluster/split`: answered when the switch is over."""
        refusal = may_order(self._intake.caller(request))
        if refusal is not None:
            raise ApiError(refusal)
        body = convert(await self._intake.body(request), SplitBody)
        try:
            Split.parse(body.split)
        except ValueError as error:
            text = str(error) if len(body.split) <= 40 else f"split must be such as 2P2D, got {shown(body.split)}"
            raise ApiError(invalid(text, "split")) from error
        query = PlannerQuery(split=body.split, reason=body.reason)
        try:
            reply = await order_switch(self._intake.bus, self._intake.subjects, "split", query, _SWITCH_S)
        except (BusError, RejectedMessage, OrderLost) as error:
            raise ApiError(unavailable(f"the planner does not answer: {error}", "planner_unavailable")) from error
        if not reply.ok:
            raise ApiError(Failure(409, "conflict_error", reply.error, "split", "split_refused"))
        return JSONResponse(msgspec.to_builtins(reply))

    def _node(self, node: Node, now: float) -> dict[str, Any]:
        core, beat, hello = self._service.core, node.telemetry, node.hello
        remaining, queue = core.ledger.wait(node.name, now)
        running, committed = core.ledger.decoding(node.name)
        return {
            "node": node.name,
            "alive": core.nodes.alive(node.name, now),
            "phase": node.phase or "",
            "epoch": node.epoch,
            "ready": beat.ready if beat else False,
            "refused": node.refusal,
            "engine_incarnation": beat.engine_incarnation if beat else 0,
            "waiting": beat.waiting if beat else 0,
            "running": beat.running if beat else 0,
            "running_prefill": beat.running_prefill if beat else 0,
            "running_decode": beat.running_decode if beat else 0,
            "predicted_wait_s": remaining + queue,
            "placed_decodes": running,
            "committed_tokens": committed,
            "kv": msgspec.to_builtins(beat.kv) if beat else None,
            "model": hello.model if hello else "",
            "engine": hello.engine if hello else "",
            "block_size": hello.block_size if hello else 0,
        }


def split_of(nodes: list[Node]) -> Split:
    """How many of these nodes serve each phase; `both` counts for both."""
    phases = [node.phase for node in nodes if node.phase is not None]
    return Split(
        sum(phase.serves(Phase.PREFILL) for phase in phases), sum(phase.serves(Phase.DECODE) for phase in phases)
    )
