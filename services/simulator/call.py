"""One LLM request on its way through the simulated cluster: what was asked, where it is, and when each step came."""

from array import array
from dataclasses import dataclass, field

Keys = "array[int]"
"""One uint64 key per full block of a context. Keys are chained: an equal key proves all blocks before it."""


@dataclass(slots=True)
class Call:
    """`agent` is the play that runs (unique per start, shared by its branches), `program` the trace it plays.

    `keys`: full blocks of the prompt, `output_keys` those that end in the answer (prompt tail included), in order; both
    are dropped when the call is over.
    `ideal_blocks`: leading blocks whose KV had been produced when the request arrived, anywhere and ever. `cached_*`
    are what was not computed: `restored` of it came from host memory, `fetched` of that from peers; `preloaded` of the
    rest had been put on the device ahead of the request. Times in virtual seconds, None where a step was not reached;
    those of prefill are of the last attempt. `fetch_s`, `restore_s`: how long the prefix took from peers and to the
    device; `fetch_exposed_s`: how much of that the device had no prefill to compute. `pause_s`: since the end of the
    branch's last answer, None for its first request.
    """

    id: str
    agent: str
    branch: str
    parent: str | None
    kind: str
    version: int
    turn: int
    keys: "array[int]"
    output_keys: "array[int]"
    prompt_tokens: int
    output_tokens: int
    media: int
    last: bool
    arrived_at: float
    pause_s: float | None = None
    ideal_blocks: int = 0
    attempt: int = 0
    prefill_node: str | None = None
    decode_node: str | None = None
    predicted_ttft_s: float | None = None
    placed_at: float | None = None
    queued_at: float | None = None
    prefill_started_at: float | None = None
    prefilled_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    cached_tokens: int = 0
    restored_tokens: int = 0
    fetched_tokens: int = 0
    preloaded_tokens: int = 0
    fetch_s: float = 0.0
    restore_s: float = 0.0
    fetch_exposed_s: float = 0.0
    notes: dict[str, object] = field(default_factory=dict)

    @property
    def uncached_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens
