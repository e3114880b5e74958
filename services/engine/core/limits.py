"""What one node takes at most, and how long it waits for others."""

from dataclasses import dataclass

from schemas.block_key import PAIRS
from services.engine.backend import BackendInfo


@dataclass(frozen=True, slots=True)
class Limits:
    """What one node takes and how long it waits for others; tokens and seconds.

    `batches_inside`: prefill batches inside the engine, the running one counted. `spare_decodes`: decode legs inside
    beyond those that run, so that the next is there when one ends. `patience_s`: how long a decode leg that found no
    room lets younger ones pass. `look_ahead`: prefill legs tried in turn while a decode node is full.
    `fetch_grace_s`: how much later than computing again a fetch may be: computing costs others, waiting only this one.
    `shared_pair`: both legs of a request on one node share their KV. `order_weight`: a waiting prefill is overtaken by
    those that come up to this many times the difference of their predicted times later; 0: first come, first served.
    """

    node: str
    block_size: int
    batch_tokens: int
    l1_tokens: int
    max_context_tokens: int
    max_running: int
    key_version: str = ""
    shared_pair: bool = False
    batches_inside: int = 2
    spare_decodes: int = 1
    max_waiting: int = 4096
    reserve_output_tokens: int = 1 << 30
    retry_s: float = 0.02
    longest_retry_s: float = 0.1
    look_ahead: int = 8
    patience_s: float = 0.3
    stranger_s: float = 1.0
    fetch_grace_s: float = 0.05
    router_timeout_s: float = 5.0
    node_timeout_s: float = 3.0
    keep_s: float = 30.0
    sweep_s: float = 0.05
    order_weight: float = 0.0

    @classmethod
    def of(cls, node: str, info: BackendInfo) -> "Limits":
        """The limits of an engine; waiting times are the defaults."""
        return cls(
            node=node,
            block_size=info.block_size,
            batch_tokens=info.batch_tokens,
            l1_tokens=info.l1_tokens,
            max_context_tokens=info.max_context_tokens,
            max_running=info.max_running,
            key_version=info.key_version,
            shared_pair=info.shared_pair,
            spare_decodes=max(1, info.max_running // 8),
        )

    def usable_blocks(self, prompt_tokens: int) -> int:
        """How many leading blocks a prompt can reuse: its last token is always computed."""
        tokens = prompt_tokens - 1
        return max(0, tokens - (self.key_version == PAIRS)) // self.block_size

    def rounded(self, tokens: int) -> int:
        """Tokens of whole blocks."""
        return -(-tokens // self.block_size) * self.block_size
