"""What nodes, requests and routers report; durations in seconds, `t` in Unix seconds for people only."""

from typing import Annotated

import msgspec
from msgspec import Meta

from schemas.codec import Count, Decoder, Incarnation, Message, Seconds, UnixTime
from schemas.phase import Phase

LENGTH_CLASSES = 32
"""Classes of answers by length: class k has those of 2**k to 2**(k+1) - 1 tokens, the first also those without any."""


def length_class(tokens: int) -> int:
    """The class of an answer of so many tokens."""
    return min(LENGTH_CLASSES - 1, max(0, tokens.bit_length() - 1))


class Iteration(msgspec.Struct, frozen=True, kw_only=True):
    """One engine iteration: the terms of the iteration-time models, summed over its batch.

    `attention_pairs` is sum of t_uc*t_c + t_uc*(t_uc+1)/2; `fed_tokens` and `accepted_tokens` are decode's t_fwd and
    t_acc summed over requests; `context_tokens` the KV length read by decode. `media`: pictures and the like of which
    it is the first to compute tokens, so that they are encoded in it.
    """

    t: UnixTime
    seq: Count
    phase: Phase
    duration_s: Seconds
    requests: Count
    uncached_tokens: Count = 0
    attention_pairs: Annotated[float, Meta(ge=0, le=1e18)] = 0.0
    restored_tokens: Count = 0
    cached_tokens: Count = 0
    context_tokens: Count = 0
    output_tokens: Count = 0
    accepted_tokens: Count = 0
    fed_tokens: Count = 0
    media: Count = 0


class IterationBatch(Message, frozen=True, kw_only=True):
    """`telemetry.iteration`: the iterations of one node since its last message, at most 100 ms of them."""

    node: str
    incarnation: Incarnation
    iterations: list[Iteration]


class TierUse(msgspec.Struct, frozen=True, kw_only=True):
    used: Count
    total: Count
    referenced: Count = 0


class KvUse(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens held per tier of a node."""

    l1: TierUse
    l2: TierUse


class NodeTelemetry(Message, frozen=True, kw_only=True):
    """`telemetry.node`: a node's heartbeat, every second; router and planner judge liveness from it alone.

    `decoding_by_length`: running decode requests by the class of their answer so far (`length_class`): element k counts
    those with 2^k to 2^(k+1) - 1 tokens, element 0 those with at most one; what is not said is 0.
    `incarnation` and `last_kv_seq` are the pool's (they go with kv.location); `engine_incarnation` changes when the
    engine process was started anew, so that its requests are gone.
    """

    node: str
    t: UnixTime
    incarnation: Incarnation
    phase: Phase
    epoch: Count
    waiting: Count
    running: Count
    kv: KvUse
    last_kv_seq: Count
    engine_incarnation: Incarnation = 0
    running_prefill: Count = 0
    running_decode: Count = 0
    decoding_by_length: Annotated[list[Count], Meta(max_length=LENGTH_CLASSES)] = []
    ready: bool = True


class RouteCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """What was predicted for one node when the request was placed: why it was chosen, or was not."""

    node: str
    wait_s: Seconds
    service_s: Seconds
    fetch_s: Seconds
    duplicate_s: Seconds
    ttft_s: Seconds
    cached_tokens: Count = 0
    fetched_from: list[str] = []


class RequestTelemetry(Message, frozen=True, kw_only=True):
    """`telemetry.request`: one finished request; times are Unix seconds, None where that step was not reached.

    `ideal_tokens`: prompt tokens whose keys the directory remembered at arrival, in full blocks (live ideal hit).
    `misses`: uncached tokens by cause (new, diverged, never_stored, evicted, evicted_referenced, node_lost,
    unreachable, not_fetched, tail). `differs_at`: the token from which on the prompt is not its branch's context, in
    full blocks.
    `candidates`: the best nodes at placement, best first. `media`: those of the prompt that were not cached.
    """

    id: str
    t: UnixTime
    request: str
    branch: str | None
    version: Count | None
    outcome: str
    t_arrive: UnixTime
    t_placed: UnixTime | None = None
    t_fetched: UnixTime | None = None
    t_prefill_start: UnixTime | None = None
    t_first_token: UnixTime | None = None
    t_end: UnixTime
    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    restored_tokens: Count = 0
    uncached_tokens: Count = 0
    ideal_tokens: Count = 0
    output_tokens: Count = 0
    prefill_node: str | None = None
    decode_node: str | None = None
    attempts: Count = 1
    ttft_predicted_s: Seconds | None = None
    ttft_s: Seconds | None = None
    blind: bool = False
    lineage: str = ""
    misses: dict[str, Count] = {}
    differs_at: Count | None = None
    candidates: list[RouteCandidate] = []
    media: Count = 0


class RouterTelemetry(Message, frozen=True, kw_only=True):
    """`telemetry.router`: a router's heartbeat; engines cancel the requests of a router silent for 5 s, and a directory
    forgets what one asked that is silent for its `node_timeout_s`, or of another `incarnation` than before."""

    router: str
    t: UnixTime
    incarnation: Incarnation
    open_requests: Count


class DirectoryTelemetry(Message, frozen=True, kw_only=True):
    """`telemetry.directory`: a directory's heartbeat; of several the one of the highest incarnation that is not blind
    serves, and the others stand by."""

    directory: str
    t: UnixTime
    incarnation: Incarnation
    blind: bool
    blocks: Count = 0


ITERATION_BATCH = Decoder(IterationBatch)
NODE_TELEMETRY = Decoder(NodeTelemetry)
REQUEST_TELEMETRY = Decoder(RequestTelemetry)
ROUTER_TELEMETRY = Decoder(RouterTelemetry)
DIRECTORY_TELEMETRY = Decoder(DirectoryTelemetry)
