"""The directory core as router and pool speak to it, told everything a harness can say or nothing at all."""

import numpy as np

from bench.lineage_plays import Indices, Keys, Request, blocks_of, keys_of
from schemas.branch import BranchEvent, BranchEventType, BranchKind
from schemas.directory import MatchQuery, MatchReply
from schemas.kv import ChangeType, KvLocation, LocationChange, Tier
from services.directory.core.directory import Directory, DirectoryConfig
from services.directory.core.effects import Effect, ReferencesChanged

NODE = "n0"
KINDS = {"fork": BranchKind.FORK, "subagent": BranchKind.SUBAGENT}
_WORK = 100


class Told:
    """A directory of one node that serves both phases. `flags` are set and cleared as it says what is referenced; None:
    it is told of no copies, and says nothing of them."""

    def __init__(self, flags: np.ndarray | None, lease_s: float, *, signals: bool) -> None:
        self.core = Directory(DirectoryConfig(branch_lease_s=lease_s, node_timeout_s=1e12), incarnation=1)
        self._flags, self._signals = flags, signals
        self._matches: dict[int, MatchReply] = {}
        self._seq = 0

    def arrives(self, request: Request, now: float) -> MatchReply:
        """The router asks where the prompt lies."""
        said = self._said(request) if self._signals else {}
        query = MatchQuery(request=f"r{request.number}", hashes=keys_of(request.blocks).tobytes(), **said)
        reply = self._matches[request.number] = self.core.match(query, now)
        return reply

    def answered(self, request: Request, new: list[tuple[int, int]], now: float) -> None:
        """The pool reports what is new, the router the branch's context and, if told, the branch's end."""
        keys = keys_of(request.blocks)
        self._stored(keys, new, now)
        match = self._matches.pop(request.number)
        base = min(match.branch_blocks, len(keys))
        event = BranchEvent(
            id=f"c{request.number}",
            t=now,
            branch=match.branch or "",
            type=BranchEventType.CONTEXT,
            source="router",
            version=match.version,
            parent=match.parent,
            kind=KINDS.get(request.row.op.value) if self._signals else None,
            request=f"r{request.number}",
            tip=int(keys[-1]) if len(keys) else None,
            blocks=len(keys),
            base_blocks=base,
            base=int(keys[base - 1]) if base else None,
            keys=keys[base:].tobytes(),
            prompt_blocks=len(keys),
            lineage=match.lineage,
            life=match.life,
            inferred=match.inferred,
            prefill_node=NODE,
            decode_node=NODE,
        )
        self._perform(self.core.on_branch_event(event, now))
        if self._signals and request.last:
            end = BranchEvent(
                id=f"e{request.number}", t=now, branch=request.branch, type=BranchEventType.END, cascade=False
            )
            self._perform(self.core.on_branch_event(end, now))

    def evicted(self, blocks: Indices, now: float) -> None:
        """The pool reports what went."""
        if len(blocks) and self._flags is not None:
            self._flags[blocks] = False
            change = LocationChange(type=ChangeType.REMOVED, tier=Tier.L2, hashes=keys_of(blocks).tobytes())
            self._located([change], now)

    def tick(self, now: float) -> None:
        self._perform(self.core.tick(now))

    def _said(self, request: Request) -> dict[str, object]:
        row = request.row
        kind = KINDS.get(row.op.value)
        return {
            "branch": request.branch,
            "version": row.version,
            "parent": request.parent if kind is not None else None,
            "kind": kind,
        }

    def _stored(self, keys: Keys, new: list[tuple[int, int]], now: float) -> None:
        changes = [
            LocationChange(
                type=ChangeType.STORED,
                tier=Tier.L2,
                parent=int(keys[first - 1]) if first else None,
                hashes=keys[first:last].tobytes(),
            )
            for first, last in new
        ]
        if changes and self._flags is not None:
            self._located(changes, now)

    def _located(self, changes: list[LocationChange], now: float) -> None:
        self._seq += 1
        message = KvLocation(node=NODE, incarnation=1, seq=self._seq, changes=changes)
        self._perform(self.core.on_location(message, now))

    def _perform(self, effects: list[Effect]) -> None:
        while True:
            for effect in effects:
                if isinstance(effect, ReferencesChanged) and self._flags is not None:
                    blocks = blocks_of(np.frombuffer(effect.keys, dtype=np.uint64))
                    self._flags[blocks] = effect.referenced and not effect.unreachable
            if not self.core.has_work:
                return
            effects = self.core.work(_WORK)
