"""What engines report of themselves, as the compared systems read it from a node."""

from services.simulator.call import Call
from services.simulator.system import NodeView


def waits(call: Call) -> bool:
    """Whether its prefill, where it is placed now, has not begun."""
    started, placed = call.prefill_started_at, call.placed_at
    return started is None or (placed is not None and started < placed)


def prefilled(call: Call) -> bool:
    """Whether its prefill, where it is placed now, has ended."""
    ended, placed = call.prefilled_at, call.placed_at
    return ended is not None and (placed is None or ended >= placed)


def queued_prompt_tokens(node: NodeView) -> int:
    """Whole prompts of requests whose prefill has not begun: cached tokens included, the engine has not looked."""
    return sum(call.prompt_tokens for call in node.prefill_calls.values() if waits(call))


def prefill_kv_tokens(node: NodeView) -> int:
    """KV of prompts in prefill or on the way to their decode node."""
    return sum(call.prompt_tokens for call in node.prefill_calls.values() if not waits(call))


def decode_kv_tokens(node: NodeView) -> int:
    """KV of all requests placed here for decode, those whose prefill goes on included. Answers are not counted."""
    return node.decode_kv + node.waiting_decode_kv
