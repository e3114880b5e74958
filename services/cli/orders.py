"""`ei split`, `ei phase`, `ei pin`, `ei unpin`, `ei planner`: orders to the planner, and what they cost."""

from collections.abc import Callable

from schemas.codec import RejectedMessage, encode
from schemas.phase import PHASE_STATE, PLANNER_REPLY, PlannerQuery, PlannerReply, SwitchState
from schemas.subjects import Subjects
from services.bus import BusError, Delivery, NatsBus, NoResponders
from services.cli.connection import CommandError, Target
from services.planner_order import OrderLost, order_switch

ANSWER_S = 3600.0
"""A switch lasts as long as the longest request of the old phase; the planner ends the wait by its own limit."""
_ASK_S = 5.0
_NO_PLANNER = "no planner answers; the split stays as it is (is the cluster up? see `ei status`)"


async def ask(bus: NatsBus, subjects: Subjects, verb: str, query: PlannerQuery, timeout_s: float) -> PlannerReply:
    """Put one question to the planner; CommandError when nobody answers or the answer is no."""
    try:
        reply = PLANNER_REPLY.decode(await bus.request(subjects.query_planner(verb), encode(query), timeout_s))
    except NoResponders as error:
        raise CommandError(_NO_PLANNER) from error
    except (BusError, RejectedMessage) as error:
        raise CommandError(f"the planner did not answer: {error}") from error
    return reply


async def order(target: Target, verb: str, query: PlannerQuery, say: Callable[[str], None]) -> PlannerReply:
    """Order a switch and wait until it is over; `say` is told what each node reports meanwhile."""
    subjects = Subjects(target.partition)

    async def report(delivery: Delivery) -> None:
        state = PHASE_STATE.decode(delivery.data)
        took = (
            f" after {state.took_s:.3f} s" if state.state is SwitchState.SWITCHED and state.took_s is not None else ""
        )
        say(f"{state.node}: {state.phase} (epoch {state.epoch}) {state.state}{took}")

    async with target.bus() as bus:
        await bus.subscribe(subjects.phase_state(Subjects.ANY), report)
        try:
            return _checked(await order_switch(bus, subjects, verb, query, ANSWER_S))
        except NoResponders as error:
            raise CommandError(_NO_PLANNER) from error
        except OrderLost as error:
            raise CommandError(str(error)) from error
        except (BusError, RejectedMessage) as error:
            raise CommandError(f"the planner did not answer: {error}") from error


async def tell(target: Target, verb: str, query: PlannerQuery) -> PlannerReply:
    """An order that is done at once: pin, mode, status."""
    async with target.bus() as bus:
        return _checked(await ask(bus, Subjects(target.partition), verb, query, _ASK_S))


def _checked(reply: PlannerReply) -> PlannerReply:
    if not reply.ok:
        raise CommandError(reply.error)
    return reply


def switch_lines(reply: PlannerReply) -> list[str]:
    """What a switch did and cost, for people."""
    if not reply.nodes:
        return [f"split {reply.split_now}: nothing to switch"]
    lines = [
        f"{node.node}: {node.old} -> {node.new} in {node.took_s or 0.0:.3f} s, {node.moved} waiting requests moved"
        for node in reply.nodes
    ]
    took = "?" if reply.took_s is None else f"{reply.took_s:.3f} s"
    lines.append(f"split {reply.split_now}: the switch took {took}")
    lines.append(f"lost: {reply.lost_tokens} tokens of KV reuse, {reply.failed} requests failed")
    return lines
