"""Answers to match queries: placement of the prefix, lineage of the request, and who else computes the same."""

from __future__ import annotations

from collections.abc import Callable

from schemas.branch import BranchKind
from schemas.directory import MatchQuery, MatchReply
from services.directory.core import lineage
from services.directory.core.absence import absent
from services.directory.core.branch import Branch
from services.directory.core.branches import Branches
from services.directory.core.departures import left_by
from services.directory.core.lineage import Judgement, Lineage, Signals
from services.directory.core.match import shared, shortened
from services.directory.core.pending import PendingPrefixes
from services.directory.core.prefix_tree import PrefixTree
from services.directory.core.run import Keys, Tip, keys_view


class Matching:
    """Changes no count: a match only registers the request as pending and renews the lease of its branch."""

    def __init__(self, tree: PrefixTree, branches: Branches, pending: PendingPrefixes) -> None:
        self._tree = tree
        self._branches = branches
        self._pending = pending

    def match(
        self, query: MatchQuery, shares: dict[str, float], blind: bool, now: float
    ) -> tuple[MatchReply, Branch | None]:
        """The answer to one query, and the branch that waits for the request if one does; an empty one to a release or
        a word on where the request was placed."""
        if query.release:
            self._pending.end(query.request)
            return MatchReply(blocks=0, blind=blind), None
        if query.placed_node is not None:
            pending = self._pending.get(query.request)
            if pending is not None:
                pending.node = query.placed_node
            return MatchReply(blocks=0, blind=blind), None
        keys = keys_view(query.hashes)
        total = len(keys)
        tips = self._tree.walk(keys)
        if query.media:
            tips = shortened(tips, self._tree.media.agreeing(keys, query.media, lambda _: True))
        self._tree.touch(tips)
        nodes, pieces = self._tree.sights.supply(tips)
        blocks = pieces[-1].last if pieces else 0
        known = 0
        for _, same in tips:
            known += same
        branch, parent, inferred, judgement = self._lineage(query, keys, tips, known)
        if branch is not None:
            self._branches.touch(branch, now)
        claim = branch.claim if branch is not None and branch.active else None
        ahead = self._pending.ahead(blocks, keys, query.request) if blocks < total else None
        waits = self._pending.add(query.request, blocks, keys, now, query.router)
        reply = MatchReply(
            blocks=blocks,
            known_blocks=known,
            branch_blocks=shared(tips, known, claim.tip) if claim is not None else 0,
            pieces=pieces,
            nodes=nodes,
            pending_blocks=ahead[0] if ahead is not None else 0,
            pending_node=ahead[1].node if ahead is not None else None,
            pending_request=ahead[1].request if ahead is not None else None,
            referenced_share=shares,
            branch=branch.key[1] if branch is not None else query.branch or _inferred_name(query),
            version=judgement.version,
            parent=parent,
            inferred=inferred,
            lineage=judgement.lineage,
            life=branch.life if branch is not None else 0,
            last_prefill_node=branch.prefill if branch is not None else None,
            last_decode_node=branch.decode if branch is not None else None,
            blind=blind,
            absent=absent(tips, blocks) if blocks < known else [],
            context_blocks=branch.blocks if claim is not None and branch is not None else 0,
        )
        return reply, branch if waits else None

    def _lineage(
        self, query: MatchQuery, keys: Keys, tips: list[Tip], known: int
    ) -> tuple[Branch | None, str | None, bool, Judgement]:
        """The branch if it is known, its parent, whether it was inferred, and what the request is to it."""
        branch = self._branches.get((query.tenant, query.branch)) if query.branch is not None else None
        if query.branch is None:
            branch = self._branches.anchors.extended_by(
                query.tenant, query.family, keys, tips, known, self._busy(query)
            )
            if branch is None:
                left = left_by(tips, query.tenant, query.family)
                kind = Lineage.OPENS if left is None else Lineage.FORK
                return None, left.key[1] if left is not None else query.family, True, Judgement(kind, 0)
        if branch is None:
            return None, query.parent, False, Judgement(self._opening(query, keys), query.version or 0)

        branch.asked = query.request
        parent = branch.parent[1] if branch.parent is not None else query.parent
        signals = Signals(query.version, query.kind is BranchKind.TRANSIENT, query.compaction)
        return branch, parent, branch.inferred, lineage.judge(branch, signals, len(keys), _reader(keys))

    def _busy(self, query: MatchQuery) -> Callable[[Branch], bool]:
        """Whether a branch waits for the answer to another request than this one."""
        return lambda branch: (
            branch.asked not in (None, query.request) and self._pending.get(branch.asked or "") is not None
        )

    def _opening(self, query: MatchQuery, keys: Keys) -> Lineage:
        """What the first request of an unknown branch is: as it says; with a parent and no word on the kind, a fork
        if it extends the parent's context."""
        if query.kind is BranchKind.TRANSIENT:
            return Lineage.TRANSIENT
        if query.kind is not None or query.parent is None:
            return lineage.opening(query.kind or BranchKind.MAIN)
        parent = self._branches.get((query.tenant, query.parent))
        if parent is None or parent.anchor is None:
            return Lineage.SUBAGENT
        extends = lineage.extends(parent.anchor, len(keys), _reader(keys))
        return Lineage.FORK if extends else Lineage.SUBAGENT


def _inferred_name(query: MatchQuery) -> str:
    """A name for a branch that nobody named: it tells the family, if there is one, and no two requests get the same."""
    return f"i-{query.request}" if query.family is None else f"{query.family[:160]}/{query.request[-16:]}"


def _reader(keys: Keys) -> lineage.KeyAt:
    return lambda number: keys[number] if number < len(keys) else None
