"""What a compared system is: what its nodes can do (`Traits`) and what it decides (`System`).

The world owns nodes, links, KV and time; a system sees them through `Cluster` and answers with actions. Everything
that differs between systems stands here: placement of prefill and decode, eviction, tiers and reach of the pool, when a
prefix is loaded, the planner, and what a change of the split costs. The rest (batching, decode, capacities, transfers)
is the same code for all of them.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

import msgspec

from schemas.phase import Phase
from schemas.serve import FetchSource
from services.engine.core.timing import Coefficients, PrefillTerms
from services.simulator.call import Call
from services.simulator.hardware import Hardware
from services.simulator.tier import KeyRun


class Load(StrEnum):
    """When a prefix that is not on the device is brought there."""

    WAITING = "waiting"
    """While the request waits in its queue; a batch takes it when the prefix is there."""
    AT_START = "at-start"
    """When its prefill starts: the device is idle until the part from peers has come."""


@dataclass(frozen=True, slots=True)
class SwitchCost:
    """What a node goes through between two phases. Running requests always end in place first.

    `relaunch_s`: out of service for so long from the command on, drawn uniformly (at least until drained). `capture_s`:
    out of service after the drain. `keeps_kv`: whether device and host memory survive. `at_once`: of a switch that
    costs nothing but KV: the node serves its new phase from the command on, and what nobody uses there goes then.
    """

    relaunch_s: tuple[float, float] | None = None
    capture_s: float = 0.0
    keeps_kv: bool = True
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class Traits:
    """What the nodes of a system can do.

    `shared_pool`: host memories are one pool, peers fetch from each other (else a prefix elsewhere is out of reach).
    `counted`: eviction takes blocks that no active branch references first (else plain LRU). `writes_output`: decode
    nodes write their answers where prefill nodes find them. `host_copies`: copies of a token in one node's host memory
    (4: one per tensor-parallel rank). `token_after_transfer`: the first token leaves from the decode node.
    `order_weight`: a waiting prefill goes by its arrival plus so many times its predicted time (0: first come, first
    served). `speculates`: multi-token prediction works. `switch`: see `SwitchCost`.
    """

    shared_pool: bool = False
    counted: bool = False
    load: Load = Load.AT_START
    writes_output: bool = False
    host_copies: int = 1
    token_after_transfer: bool = False
    order_weight: float = 0.0
    speculates: bool = True
    switch: SwitchCost = SwitchCost()


class NodeView(Protocol):
    """What a system may know of a node; tokens unless said otherwise.

    `phase` None: out of service. `moving`: a change of its phase has not ended. `prefill_calls`, `decode_calls`: placed
    here and not yet through (waiting ones included). `queued_uncached`: uncached tokens of prefills that have not
    begun. `decode_kv`: KV of requests in decode, `waiting_decode_kv` of those placed here whose prefill has not ended.
    """

    name: str

    @property
    def phase(self) -> Phase | None: ...
    @property
    def moving(self) -> bool: ...
    @property
    def prefill_calls(self) -> Mapping[str, Call]: ...
    @property
    def decode_calls(self) -> Mapping[str, Call]: ...
    @property
    def queued_uncached(self) -> int: ...
    @property
    def decoding(self) -> int: ...

    def decoding_by_length(self, now: float) -> list[int]:
        """Those of them that have given 2**k to 2**(k+1) - 1 tokens, by k."""
        ...

    @property
    def decode_kv(self) -> int: ...
    @property
    def waiting_decode_kv(self) -> int: ...
    @property
    def l1_tokens(self) -> int: ...
    @property
    def l2_tokens(self) -> int: ...
    @property
    def l2_used_tokens(self) -> int: ...
    @property
    def l2_referenced_tokens(self) -> int: ...

    def cached_blocks(self, call: Call) -> tuple[int, int]:
        """Leading full blocks of its prompt here: in device memory, and in either tier."""
        ...


class Cluster(Protocol):
    """What a system sees of the world. `times`: the coefficients the engines really have (offline profiles are exact).

    `draw`: a uniform random number, reproducible by seed, for rules that need one.
    """

    block_tokens: int
    batch_tokens: int
    hardware: Hardware
    times: Coefficients

    @property
    def nodes(self) -> Mapping[str, NodeView]: ...

    def serving(self, phase: Phase) -> Sequence[NodeView]:
        """Nodes that take new requests of `phase` now, in order of name."""
        ...

    def draw(self) -> float: ...

    def refer(self, node: str, runs: Sequence[KeyRun], *, referenced: bool, unreachable: bool) -> None:
        """Mark copies in a node's host memory for eviction, as a directory says."""
        ...

    def value(self, node: str, runs: Sequence[KeyRun], value: int, *, referenced: bool) -> None:
        """What copies in a node's host memory are worth while they are referenced, or are not."""
        ...


class Place(msgspec.Struct, frozen=True):
    """Send a call to these nodes. `fetch`: blocks of the prompt to bring from peers' host memory (shared pool only).

    `cached_tokens`: what the system expects to be there when its prefill begins.
    """

    call: Call
    prefill: str
    decode: str
    fetch: tuple[FetchSource, ...] = ()
    predicted_ttft_s: float | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Move:
    """Change a node's phase, at the cost of the system's `SwitchCost`; None takes it out of service after its drain.

    Waiting requests come back through `arrived`. Moves returned together are one switch. `counts` False: it is part of
    the start (learning models, the first split) and not reported as a switch.
    """

    node: str
    phase: Phase | None
    reason: str = ""
    counts: bool = True


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Take a call that still waits for its prefill back from its nodes; it is the system's to place again."""

    call: Call


@dataclass(frozen=True, slots=True)
class Migrate:
    """Move a running decode to another node; its KV travels while it goes on, then it stops there and goes on here.

    Nothing happens where the other node has no room for it.
    """

    call: Call
    node: str


@dataclass(frozen=True, slots=True)
class Preload:
    """Bring what a node's host memory has of a branch's context to its device, ahead of the branch's next request.

    It takes device memory that nothing running or promised needs; where there is too little, nothing happens. A request
    that never comes leaves a cached copy, the next to go when its time has come.
    """

    branch: str
    keys: "array[int]"
    node: str


Action = Place | Move | Withdraw | Migrate | Preload


class System(Protocol):
    """Decisions of one system. A call for which `arrived` returns no `Place` is held until a later action places it.

    Actions of every method are carried out in order, at once. The defaults of `Passive` do nothing.
    """

    id: str
    traits: Traits

    def begin(self, cluster: Cluster, now: float) -> None:
        """The cluster as it starts; keep it."""
        ...

    def arrived(self, call: Call, now: float) -> Sequence[Action]:
        """A new request, or one that was given back by a node that changed its phase (`attempt` > 0)."""
        ...

    def prefill_started(self, call: Call, now: float) -> None: ...

    def prefilled(self, call: Call, now: float) -> Sequence[Action]:
        """Its prefill has ended; it goes on to its decode node."""
        ...

    def ended(self, call: Call, now: float) -> Sequence[Action]:
        """Answered. Its branch has ended too if `call.last`."""
        ...

    def moved(self, node: str, now: float) -> Sequence[Action]:
        """A change of the node's phase has ended: nothing of the old phase runs there, and it serves the new one."""
        ...

    def next_wake(self, now: float) -> float | None:
        """When `wake` is to be called next at the latest; asked after every call of a method."""
        ...

    def wake(self, now: float) -> Sequence[Action]:
        """Time has come."""
        ...


@runtime_checkable
class KvListener(Protocol):
    """A system that follows where KV lies implements this too; keys in chain order."""

    def stored(self, node: str, tier: str, parent: int | None, keys: "array[int]", now: float) -> None: ...

    def removed(self, node: str, tier: str, parent: int | None, keys: "array[int]", now: float) -> None: ...

    def cleared(self, node: str, tier: str, now: float) -> None: ...


@runtime_checkable
class EngineListener(Protocol):
    """A system that follows iterations implements this too; `now` is their end."""

    def prefill_iterated(
        self, node: str, terms: PrefillTerms, cached_tokens: int, duration_s: float, now: float
    ) -> None: ...

    def decode_iterated(
        self, node: str, count: int, requests: int, context_tokens: float, duration_s: float, now: float
    ) -> None:
        """`count` iterations in a row with the same `requests`, over `context_tokens` on average."""
        ...
