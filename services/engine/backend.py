"""What the engine service and an engine agree on: legs go in, states, tokens and ends come out.

A request has two legs: its prefill on one node, its decode on another (or the same). The service decides which leg
enters when; a backend runs what is inside it and nothing else. Implemented by `services.engine.timed` and
`services.engine.sglang`; both are chosen in `services.engine.__main__`.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from schemas.kv import LocationChange
from schemas.media import Medium
from schemas.phase import Phase
from schemas.serve import Finish, RequestState, Sampling
from schemas.telemetry import Iteration


class LegKey(NamedTuple):
    """Names one leg of one attempt on a node; `phase` is prefill or decode."""

    id: str
    attempt: int
    phase: Phase


@dataclass(frozen=True, slots=True)
class Leg:
    """One leg as it enters the engine; all that an engine may know about it.

    `tokens`: the whole prompt, u32 little-endian. `digests`: the 32-byte digest of each of its full blocks.
    `room`: the transfer's id, the same in both legs of one attempt and in no other attempt.
    `peer` is the node of the other leg, `rendezvous` the "host:port" of the engine that prefills (both legs).
    `restorable_blocks`: leading blocks of a prefill leg that lie in the node's own host memory, pinned there until
    `ended` (0 for a decode leg). `session` is "<branch>@<version>". `media` say which tokens stand for what of `data`.
    """

    key: LegKey
    tokens: bytes
    prompt_tokens: int
    sampling: Sampling
    room: int
    peer: str
    rendezvous: str
    digests: tuple[bytes, ...] = ()
    restorable_blocks: int = 0
    session: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    media: tuple[Medium, ...] = ()
    data: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """What an engine is; constant from the end of `start` on.

    `batch_tokens`: uncached tokens one prefill iteration takes at most (chunk size). `l1_tokens`: KV tokens device
    memory holds. `max_running`: requests one decode iteration takes at most. `rendezvous`: "host:port" where decode
    engines find this engine's transfers ("" when it needs none). `shared_pair`: the two legs of a request that runs on
    this node alone share their KV, so that the prefill leg takes no room of its own. `experts_per_token` of `experts`:
    the model's routed experts, 0 for a dense model.
    """

    engine: str
    model: str
    dtype: str
    block_size: int
    block_bytes: int
    key_version: str
    ranks: int
    l1_tokens: int
    max_context_tokens: int
    max_running: int
    batch_tokens: int
    rendezvous: str = ""
    tokenizer: str = ""
    shared_pair: bool = False
    experts_per_token: int = 0
    experts: int = 0


class BackendEvents(Protocol):
    """What an engine tells its service. Every call is made on the event loop's thread and returns at once."""

    def state(self, key: LegKey, state: RequestState) -> None:
        """A leg inside went on: prefilling, transferring or decoding."""

    def tokens(self, key: LegKey, first_index: int, tokens: list[int]) -> None:
        """Tokens [first_index, first_index + len) of the answer. A prefill leg gives index 0, its decode leg all."""

    def ended(self, key: LegKey, finish: Finish, reason: str, cached_tokens: int, restored_tokens: int) -> None:
        """The leg is out of the engine and holds nothing there; exactly once per submitted leg, its last event.

        A prefill leg ends `handed_off` (or stop / length when the first token was the last). `cached_tokens` were not
        computed; `restored_tokens` of them came from host memory. `reason` says what went wrong, "" otherwise.
        """

    def iteration(self, iteration: Iteration) -> None:
        """One iteration ended. Called after the token events of its batch: the service sends replies then."""

    def device_changes(self, changes: list[LocationChange]) -> None:
        """Blocks came to or left device memory (tier l1), in order."""

    def failed(self, reason: str) -> None:
        """The engine itself is dead; no event follows, all legs inside are lost."""


class Backend(Protocol):
    """An engine. All methods are called on the event loop's thread; only `start` and `stop` may take time."""

    info: BackendInfo

    async def start(self, events: BackendEvents) -> None:
        """Make the engine ready to take legs; `info` is complete afterwards. Raises if it cannot."""

    def submit(self, leg: Leg) -> None:
        """Take a leg in, for which `room` was enough. A decode leg reserves KV for prompt and answer now."""

    def cancel(self, key: LegKey) -> None:
        """Stop a leg; `ended` follows when everything it held is free (memory still being written: not before that
        write has ended). A key that is not inside is ignored."""

    def prefilled(self, key: LegKey, token: int) -> None:
        """The peer has prefilled this decode leg and sampled `token`. Engines whose own transfer says so ignore it."""

    def room(self, phase: Phase) -> int:
        """KV tokens that a new leg of `phase` could take now, everything submitted so far already subtracted."""

    def used_tokens(self) -> int:
        """KV tokens in device memory, cached ones included."""

    def drop_decode_cache(self) -> None:
        """A switch away from decode has ended: free device blocks that only decode used (unlocked ones)."""

    async def stop(self) -> None:
        """Stop the engine and what it started; legs inside are abandoned without events."""
