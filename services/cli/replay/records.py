"""What a replay keeps of every request, and how requests turn out."""

from enum import StrEnum

import msgspec


class Outcome(StrEnum):
    ANSWERED = "answered"
    FAILED = "failed"


class RequestRecord(msgspec.Struct, kw_only=True):
    """One request as the agent saw it; times in seconds since the start of the replay, tokens of the played scale.

    `pause_s`: from the end of the branch's former answer to the arrival of this request. `ideal_tokens`: prompt tokens
    whose KV had been produced before, in full blocks. What only the cluster knows is None without its telemetry.
    """

    request: str
    trace_request: str
    agent: str
    branch: str
    operation: str
    version: int
    outcome: Outcome
    sent_s: float
    error: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ideal_tokens: int = 0
    output_tokens: int = 0
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    pause_s: float | None = None
    turned_away: int = 0
    prefill_node: str = ""
    decode_node: str = ""
    restored_tokens: int | None = None
    queue_s: float | None = None
    ttft_predicted_s: float | None = None
    scored: bool = True
