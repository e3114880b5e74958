"""The queue of a simulated node: the product's, with waiting times that nobody needs in virtual time turned off."""

from schemas.phase import Phase
from services.engine.core.limits import Limits
from services.engine.core.queueing import Queueing
from services.simulator.hardware import Hardware
from services.simulator.system import Traits

NEVER_S = 1e9
SWEEP_S = 60.0
RETRY_S = 0.1
"""How often a prefill node asks a full decode node again: the product asks sooner, each ask is an event here."""


def queue_of(name: str, phase: Phase | None, hardware: Hardware, block_tokens: int, traits: Traits) -> Queueing:
    """An empty queue; nobody falls silent, and old legs are swept once a minute."""
    limits = Limits(
        node=name,
        block_size=block_tokens,
        batch_tokens=hardware.batch_tokens,
        l1_tokens=hardware.l1_tokens,
        max_context_tokens=hardware.l1_tokens,
        max_running=hardware.max_running,
        shared_pair=True,
        max_waiting=1 << 30,
        router_timeout_s=NEVER_S,
        node_timeout_s=NEVER_S,
        retry_s=RETRY_S,
        longest_retry_s=2 * RETRY_S,
        sweep_s=SWEEP_S,
        order_weight=traits.order_weight,
    )
    return Queueing.of(limits, hardware.times, phase=phase or Phase.BOTH)
