"""The directory in virtual time: the product's core, told of every change of KV at once.

Simulated keys are consecutive numbers; the directory is told them multiplied by an odd constant, since its index takes
keys for digests: evenly spread.
"""

import math
from array import array

import numpy as np

from schemas.branch import BranchEvent, BranchEventType, BranchKind
from schemas.directory import MatchQuery, MatchReply
from schemas.kv import ChangeType, KvLocation, LocationChange, SnapshotPart, Tier
from schemas.phase import Phase
from services.directory.core.directory import Directory, DirectoryConfig
from services.directory.core.effects import Effect, NeedSnapshot, ReferencesChanged, ValuesChanged
from services.directory.core.waits import EDGES_S, bin_of
from services.simulator.call import Call
from services.simulator.system import Cluster
from services.simulator.telemetry import command_of, hello_of
from services.simulator.tier import KeyRun

TICK_S = 1.0
WORK_STEPS = 64
_FOREVER_S = 1e12
_SPREAD = 0x9E3779B97F4A7C15
_SPREAD_KEY = np.uint64(_SPREAD)
_WORD = 1 << 64
_LAST = _WORD - 1
_FEW_KEYS = 16
_GATHER = pow(_SPREAD, -1, _WORD)
_KINDS = {"fork": BranchKind.FORK, "subagent": BranchKind.SUBAGENT}


class SimulatedDirectory:
    """Matches, claims and locations. `counted`: pools are told which copies are referenced, and what they are worth."""

    def __init__(self, cluster: Cluster, *, counted: bool, now: float) -> None:
        self.core = Directory(DirectoryConfig(node_timeout_s=_FOREVER_S, pending_lease_s=3600.0), incarnation=1)
        self._cluster, self._counted = cluster, counted
        self._seq = dict.fromkeys(cluster.nodes, 0)
        self._matches: dict[str, MatchReply] = {}
        self._kinds: set[str] = set()
        self._epoch = 0
        for name, node in cluster.nodes.items():
            self._follow(self.core.on_hello(hello_of(name, node, cluster), now), now)

    def match(self, call: Call, now: float) -> MatchReply:
        """Where the prefix of a call lies; the call counts as pending."""
        kind = None
        if call.branch not in self._kinds:
            self._kinds.add(call.branch)
            kind = _KINDS.get(call.kind, BranchKind.MAIN)
        query = MatchQuery(
            request=call.id,
            hashes=_spread(call.keys),
            prompt_tokens=call.prompt_tokens,
            branch=call.branch,
            version=call.version,
            parent=call.parent,
            kind=kind,
        )
        reply = self._matches[call.id] = self.core.match(query, now)
        self._work(now)
        return reply

    def placement(self, keys: "array[int]") -> MatchReply:
        """Where a context lies, without a request."""
        nodes, pieces = self.core.placement(_spread(keys))
        return MatchReply(blocks=pieces[-1].last if pieces else 0, nodes=nodes, pieces=pieces)

    def likely_back_at(self, branch: str, now: float) -> float:
        """When an absent branch is likeliest to come back, from now on; never if nothing is known of it.

        That is the age at which keeping its blocks for a while pays most (`Waits.rates`): returns are densest there.
        """
        known = self.core.branches.get(("", branch))
        sleeper = None if known is None else self.core.values.sleepers.get(known)
        if sleeper is None or sleeper.requests:
            return math.inf
        rates = self.core.values.sleepers.waits.rates(sleeper.kind)
        likeliest = max(range(bin_of(now - sleeper.since), len(rates)), key=rates.__getitem__)
        return max(now, sleeper.since + EDGES_S[likeliest])

    def placed(self, call: Call, node: str, now: float) -> None:
        """Others with the same prefix may wait for it there."""
        self.core.match(MatchQuery(request=call.id, placed_node=node), now)

    def answered(self, call: Call, now: float) -> None:
        """The branch's new context, as the router publishes it; and the branch's end."""
        match = self._matches.pop(call.id)
        context = call.keys + call.output_keys
        base = min(match.branch_blocks, len(context))
        event = BranchEvent(
            id=f"{call.id}/context",
            t=now,
            branch=call.branch,
            type=BranchEventType.CONTEXT,
            parent=match.parent,
            version=match.version,
            source="router",
            request=call.id,
            tip=_one(context[-1]) if context else None,
            blocks=len(context),
            base_blocks=base,
            base=_one(context[base - 1]) if base else None,
            keys=_spread(context[base:]),
            prompt_blocks=len(call.keys),
            kind=_KINDS.get(call.kind),
            lineage=match.lineage,
            life=match.life,
            prefill_node=call.prefill_node,
            decode_node=call.decode_node,
        )
        self._follow(self.core.on_branch_event(event, now), now)
        if call.last:
            end = BranchEvent(id=f"{call.id}/end", t=now, branch=call.branch, type=BranchEventType.END, source="router")
            self._follow(self.core.on_branch_event(end, now), now)

    def commanded(self, node: str, phase: Phase, now: float) -> None:
        """A node's phase is ordered."""
        self._epoch += 1
        self._follow(self.core.on_phase(command_of(node, phase, self._epoch, now)), now)

    def tick(self, now: float) -> None:
        """Once a second."""
        self._follow(self.core.tick(now), now)

    # where KV lies

    def stored(self, node: str, tier: str, parent: int | None, keys: "array[int]", now: float) -> None:
        """New copies are neither referenced nor unreachable to their pool: it needs no word that says so."""
        change = _change(ChangeType.STORED, tier, parent, keys)
        new = ReferencesChanged(node, referenced=False, unreachable=False, keys=change.hashes)
        self._follow([effect for effect in self._moved(node, change, now) if effect != new], now)

    def removed(self, node: str, tier: str, parent: int | None, keys: "array[int]", now: float) -> None:
        self._follow(self._moved(node, _change(ChangeType.REMOVED, tier, parent, keys), now), now)

    def cleared(self, node: str, tier: str, now: float) -> None:
        self._follow(self._moved(node, LocationChange(type=ChangeType.CLEARED, tier=Tier(tier)), now), now)

    def _moved(self, node: str, change: LocationChange, now: float) -> list[Effect]:
        self._seq[node] += 1
        return self.core.on_location(KvLocation(node=node, incarnation=1, seq=self._seq[node], changes=[change]), now)

    # effects

    def _work(self, now: float) -> None:
        while self.core.has_work:
            self._carry_out(self.core.work(WORK_STEPS), now)

    def _follow(self, effects: list[Effect], now: float) -> None:
        self._carry_out(effects, now)
        self._work(now)

    def _carry_out(self, effects: list[Effect], now: float) -> None:
        said: dict[str, tuple[bool, bool, list[KeyRun]]] = {}
        for effect in effects:
            if isinstance(effect, ReferencesChanged):
                if self._counted and effect.keys:
                    before = said.get(effect.node)
                    if before is not None and before[:2] == (effect.referenced, effect.unreachable):
                        before[2].extend(_runs(effect.keys))
                        continue
                    if before is not None:
                        self._tell(effect.node, *before)
                    said[effect.node] = effect.referenced, effect.unreachable, _runs(effect.keys)
            elif isinstance(effect, ValuesChanged):
                if self._counted:
                    self._cluster.value(effect.node, _runs(effect.keys), effect.value, referenced=effect.referenced)
            elif isinstance(effect, NeedSnapshot):
                empty = SnapshotPart(
                    node=effect.node, incarnation=1, seq=self._seq[effect.node], snapshot="0", changes=[]
                )
                self._carry_out(self.core.on_snapshot(empty, now), now)
        for node, what in said.items():
            self._tell(node, *what)

    def _tell(self, node: str, referenced: bool, unreachable: bool, runs: list[KeyRun]) -> None:
        """Tell a pool at once what was said of its copies in a row."""
        self._cluster.refer(node, runs, referenced=referenced, unreachable=unreachable)


def _one(key: int) -> int:
    return key * _SPREAD % _WORD


def _spread(keys: "array[int]") -> bytes:
    return (np.frombuffer(keys, np.uint64) * _SPREAD_KEY).tobytes()


def _runs(packed: bytes) -> list[KeyRun]:
    """The nodes' own keys behind packed ones, as runs of consecutive ones."""
    keys = memoryview(packed).cast("Q")
    count = len(keys)
    if count <= _FEW_KEYS:
        starts = [at for at in range(1, count) if keys[at] != (keys[at - 1] + _SPREAD) & _LAST]
    else:
        many = np.frombuffer(packed, np.uint64)
        starts = ((many[1:] - many[:-1] != _SPREAD_KEY).nonzero()[0] + 1).tolist()
    start, runs = 0, list[KeyRun]()
    for end in (*starts, count):
        runs.append((keys[start] * _GATHER & _LAST, end - start))
        start = end
    return runs


def _change(type_: ChangeType, tier: str, parent: int | None, keys: "array[int]") -> LocationChange:
    before = None if parent is None else _one(parent)
    return LocationChange(type=type_, tier=Tier(tier), hashes=_spread(keys), parent=before)
