"""Where a request goes: predicted time to first token per prefill node, predicted iteration time per decode node.

    TTFT(n) = T_rem(n) + sum over queue T_req + T_req(n, w) + max(0, T_fetch - wait) + C_dup

A prefix at peers is fetched or computed again, whichever is sooner; a fetch takes no compute from other requests, so
it may be later by `RECOMPUTE_GAIN_S`. Equal nodes take turns.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from schemas.directory import MatchReply
from schemas.serve import FetchSource
from services.router.core.prefix import Prefix, local_prefix, reusable_blocks, shared_prefix
from services.router.core.timing import (
    DEFAULT,
    Coefficients,
    Work,
    decode_iteration_s,
    iteration_rest_s,
    prefill_s,
    token_s,
)

TIE_S = 1e-9
RECOMPUTE_GAIN_S = 0.05
"""Computing cached tokens again must save the request more than this, since it costs all others compute."""


@dataclass(frozen=True, slots=True)
class PrefillView:
    """A node that serves prefill: rest of its running batch, predicted time of its queue, room of its pool."""

    node: str
    remaining_s: float = 0.0
    queue_s: float = 0.0
    pool_total_tokens: int = 0
    pool_used_tokens: int = 0
    pool_referenced_tokens: int = 0
    model: Coefficients = DEFAULT

    @property
    def wait_s(self) -> float:
        return self.remaining_s + self.queue_s


@dataclass(frozen=True, slots=True)
class DecodeView:
    """A node that serves decode: requests it has from us, the tokens promised to them, and what it can hold."""

    node: str
    running: int = 0
    committed_tokens: int = 0
    capacity_tokens: int = 0
    running_limit: int = 0
    model: Coefficients = DEFAULT

    def has_room(self, tokens: int) -> bool:
        """Whether `tokens` more fit; capacities of 0 are unknown and hold anything."""
        fits = not self.capacity_tokens or self.committed_tokens + tokens <= self.capacity_tokens
        return fits and (not self.running_limit or self.running < self.running_limit)


class FetchCost(msgspec.Struct, frozen=True):
    """Moving KV from a peer's host memory: tokens over the rate, plus a latency. Rate and latency of one pair."""

    tokens_per_s: float
    latency_s: float

    def seconds(self, tokens: int) -> float:
        return tokens / self.tokens_per_s + self.latency_s if tokens else 0.0


FetchCosts = Callable[[str, str], FetchCost]
"""(from node, to node) -> cost."""


class Candidate(msgspec.Struct, frozen=True):
    """The prediction for one node, term by term, and what it would fetch. `service_s` is the share of the node's time,
    `rest_s` the rest of the iteration. `resume`: it serves decode, and would prefill this request because its KV lies
    there."""

    node: str
    remaining_s: float
    queue_s: float
    service_s: float
    fetch_s: float
    duplicate_s: float
    work: Work
    fetch: tuple[FetchSource, ...] = ()
    resume: bool = False
    rest_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        wait = self.remaining_s + self.queue_s
        return wait + self.service_s + self.rest_s + max(0.0, self.fetch_s - wait) + self.duplicate_s


class Prompt(msgspec.Struct, frozen=True):
    """A prompt to place: its tokens, the block size, what the directory answered, and where its media end, in order."""

    tokens: int
    block_size: int
    match: MatchReply
    media_ends: tuple[int, ...] = ()

    @property
    def limit(self) -> int:
        return reusable_blocks(self.tokens, self.block_size)

    def work(self, blocks: int, device_blocks: int) -> Work:
        """What is left of it where the KV of its first `blocks` blocks is used, `device_blocks` of them in place."""
        cached = blocks * self.block_size
        media = len(self.media_ends) - bisect_right(self.media_ends, cached)
        return Work(self.tokens - cached, cached, (blocks - device_blocks) * self.block_size, media)


def predict(prompt: Prompt, view: PrefillView, usable: Callable[[str], bool], costs: FetchCosts) -> Candidate:
    """The plan for one node: the whole prefix with a fetch, or its own part when that is clearly sooner."""
    whole = shared_prefix(view.node, prompt.match, prompt.limit, usable)
    plan = _candidate(prompt, view, whole, costs)
    if not whole.fetch:
        return plan
    alone = _candidate(prompt, view, local_prefix(view.node, prompt.match, prompt.limit), costs)
    return alone if alone.ttft_s + RECOMPUTE_GAIN_S < plan.ttft_s else plan


def alone_s(prompt: Prompt, view: PrefillView) -> float:
    """How long the node would compute with what lies in the cluster now, nobody else's unfinished work counted."""
    match = msgspec.structs.replace(prompt.match, pending_blocks=0, pending_node=None)
    blocks = shared_prefix(view.node, match, prompt.limit, lambda _: True).blocks
    return prefill_s(view.model, prompt.work(blocks, blocks))


def _candidate(prompt: Prompt, view: PrefillView, prefix: Prefix, costs: FetchCosts) -> Candidate:
    work = prompt.work(prefix.blocks, prefix.device)
    fetched = prefix.fetched_blocks * prompt.block_size
    fetch_s = sum(
        costs(source.node, view.node).seconds((source.last - source.first) * prompt.block_size)
        for source in prefix.fetch
    )
    return Candidate(
        view.node,
        view.remaining_s,
        view.queue_s,
        prefill_s(view.model, work),
        fetch_s,
        duplicate_s(view, fetched, prompt.match.referenced_share.get(view.node)),
        work,
        prefix.fetch,
        rest_s=iteration_rest_s(view.model, work),
    )


def duplicate_s(view: PrefillView, fetched_tokens: int, referenced_share: float | None) -> float:
    """C_dup: tokens the duplicate displaces, times the share of them that are referenced, times the time of a token.

    0 while the pool has room that no active branch references. `referenced_share` None: the pool's own figure.
    """
    used, total = view.pool_used_tokens, view.pool_total_tokens
    if not fetched_tokens or not used:
        return 0.0
    share = min(1.0, view.pool_referenced_tokens / used) if referenced_share is None else referenced_share
    if fetched_tokens <= total - used * share:
        return 0.0
    return max(0, fetched_tokens - max(0, total - used)) * share * token_s(view.model)


def choose_prefill(candidates: Sequence[Candidate], turn: int) -> Candidate:
    """The smallest predicted TTFT; `turn` rotates among equals. ValueError without candidates."""
    best = min(candidate.ttft_s for candidate in candidates)
    equal = [candidate for candidate in candidates if candidate.ttft_s <= best + TIE_S]
    return equal[turn % len(equal)]


def choose_decode(views: Sequence[DecodeView], tokens: int, prefill_node: str | None, turn: int) -> DecodeView:
    """The smallest predicted iteration time with the request among nodes with room for its `tokens`.

    Where none has room, the one with the least promised: the request waits for its turn there. Among equals the
    prefill node itself comes first (nothing to move), then nodes take turns.
    """
    roomy = [view for view in views if view.has_room(tokens)]
    if not roomy:
        return min(views, key=lambda view: view.committed_tokens / max(1, view.capacity_tokens))
    times = [decode_iteration_s(view.model, view.running + 1) for view in roomy]
    best = min(times)
    equal = [view for view, seconds in zip(roomy, times, strict=True) if seconds <= best + TIE_S]
    return next((view for view in equal if view.node == prefill_node), equal[turn % len(equal)])
