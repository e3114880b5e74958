"""The rules of the directory once more, per block and per branch, in plain dictionaries: slow, and easy to believe."""

import hashlib
from array import array
from dataclasses import dataclass, field
from functools import lru_cache

from schemas.branch import BranchEvent, BranchEventType, BranchKind, BranchState, Compaction
from schemas.directory import AbsenceReason, MatchQuery
from schemas.kv import Tier
from schemas.phase import Phase

Context = tuple[int, ...]
"""Labels of the blocks of a context."""
OPENED = (BranchKind.FORK, BranchKind.SUBAGENT)
PHASES = (Phase.PREFILL, Phase.DECODE)


@lru_cache(maxsize=100_000)
def key_of(context: Context) -> int:
    """The chained key of the last block of a context."""
    return int.from_bytes(hashlib.sha256(repr(context).encode()).digest()[:8], "big")


def keys_of(context: Context) -> list[int]:
    return [key_of(context[: end + 1]) for end in range(len(context))]


def pack(keys: list[int]) -> bytes:
    return array("Q", keys).tobytes()


def common(a: Context, b: Context) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def must_come_back(prompt: Context) -> Context:
    """What a later prompt must contain to extend this one: all blocks but the last two, and at least one."""
    return prompt[: max(1, len(prompt) - 2)]


def extends(last: Context, prompt: Context) -> bool:
    return not last or common(must_come_back(last), prompt) == len(must_come_back(last))


@dataclass
class Claimed:
    context: Context
    homes: dict[Phase, str | None]


@dataclass
class ModelBranch:
    version: int
    seen: float
    kind: BranchKind = BranchKind.MAIN
    parent: str | None = None
    life: int = 0
    state: BranchState = BranchState.ACTIVE
    fresh: bool = True
    opened: bool = False
    grown: bool = False
    compacting: bool = False
    prompt: Context = ()
    departed: list[tuple[int, Context]] = field(default_factory=list)
    claimed: Claimed | None = None
    kept: dict[int, str] = field(default_factory=dict)
    with_descendants: bool = False

    def claims(self, key: int) -> bool:
        """Whether it claims this block on any node."""
        if self.claimed is None:
            return False
        placed = any(home is not None for home in self.claimed.homes.values())
        return key in self.kept or (placed and key in keys_of(self.claimed.context))


class Model:
    """What lies where (`view`, as reported), who claims what, and where a prefill claim is kept for want of a copy."""

    def __init__(self, nodes: tuple[str, ...], lease_s: float) -> None:
        self.view: dict[str, dict[Tier, set[int]]] = {node: {tier: set() for tier in Tier} for node in nodes}
        self.branches: dict[str, ModelBranch] = {}
        self.phases: dict[str, tuple[Phase | None, int]] = dict.fromkeys(nodes, (None, -1))
        self.known: set[int] = set()
        self.applied: set[str] = set()
        self.lease_s = lease_s
        self.why: dict[int, AbsenceReason] = {}
        self.ever_lost: set[int] = set()

    # copies

    def stored(self, node: str, tier: Tier, keys: list[int]) -> None:
        self.known.update(keys)
        self.view[node][tier].update(keys)
        for branch in self.branches.values():
            if branch.claimed is not None and branch.claimed.homes[Phase.PREFILL] == node:
                for key in keys:
                    branch.kept.pop(key, None)

    def removed(self, node: str, tier: Tier, keys: list[int]) -> None:
        for key in self.view[node][tier].intersection(keys):
            claimed = any(branch.claims(key) for branch in self.branches.values())
            self.why[key] = AbsenceReason.EVICTED_REFERENCED if claimed else AbsenceReason.EVICTED
        self.view[node][tier].difference_update(keys)

    def emptied(self, node: str, tier: Tier) -> None:
        self.removed(node, tier, list(self.view[node][tier]))

    def lost(self, node: str) -> None:
        for tier in Tier:
            self.why |= dict.fromkeys(self.view[node][tier], AbsenceReason.NODE_LOST)
            self.ever_lost |= self.view[node][tier]
            self.view[node][tier].clear()

    def absence(self, key: int) -> AbsenceReason:
        """Why a known block is not supplied."""
        if self.holders(key):
            return AbsenceReason.UNREACHABLE
        return self.why.get(key, AbsenceReason.NEVER_STORED)

    def copies(self, node: str) -> set[int]:
        return self.view[node][Tier.L1] | self.view[node][Tier.L2]

    def holders(self, key: int) -> set[str]:
        return {node for node in self.view if key in self.copies(node)}

    def count(self, node: str, key: int) -> int:
        """The count of a copy: claims of active branches on its block at its node."""
        if key not in self.copies(node):
            return 0
        claims = 0
        for branch in self.branches.values():
            if branch.claimed is None or key not in keys_of(branch.claimed.context):
                continue
            prefill = branch.kept.get(key, branch.claimed.homes[Phase.PREFILL])
            claims += (prefill == node) + (branch.claimed.homes[Phase.DECODE] == node)
        return claims

    # phases and time

    def phase(self, node: str, phase: Phase, epoch: int) -> None:
        old, last = self.phases[node]
        if epoch <= last:
            return
        self.phases[node] = (phase, epoch)
        if phase is not Phase.PREFILL or old is Phase.PREFILL:
            return
        for branch in self.branches.values():
            claimed = branch.claimed
            if claimed is not None and claimed.homes[Phase.DECODE] == node:
                if claimed.homes[Phase.PREFILL] != node:
                    for key in keys_of(claimed.context):
                        if self.holders(key) == {node}:
                            branch.kept[key] = node
                claimed.homes[Phase.DECODE] = None

    def tick(self, now: float) -> None:
        for branch in self.branches.values():
            if branch.state is BranchState.ACTIVE and now - branch.seen >= self.lease_s:
                branch.state = BranchState.IDLE
                self._unclaim(branch)

    # branches

    def event(self, event: BranchEvent, context: Context, now: float) -> None:
        if event.id in self.applied:
            return
        self.applied.add(event.id)
        branch = self.branches.get(event.branch)
        if event.type is BranchEventType.END and branch is None:
            branch = self.branches[event.branch] = ModelBranch(event.version or 0, now)
        ended = branch is not None and branch.state is BranchState.ENDED
        older = branch is not None and event.version is not None and event.version < branch.version
        if event.type is BranchEventType.CONTEXT:
            life = branch.life if branch is not None else 0
            if ended:
                late = event.life is None or event.life < life
            else:
                late = older or (event.life is not None and event.life < life)
            if not late:
                self._context(event, context, now)
        elif event.type is BranchEventType.KEEPALIVE:
            if branch is not None and branch.state is BranchState.ACTIVE:
                branch.seen = now
        elif not ended and not older:
            if branch is None:
                branch = self._new(event, now)
            elif branch.state is BranchState.ACTIVE:
                branch.seen = now
            self._signal(event, branch)

    def _new(self, event: BranchEvent, now: float) -> ModelBranch:
        branch = self.branches[event.branch] = ModelBranch(event.version or 0, now)
        if event.type is BranchEventType.COMPACT:
            branch.version = 0 if event.version is None else event.version
        parent = self.branches.get(event.parent or "")
        if event.type is BranchEventType.FORK and parent is not None and parent is not branch and parent.claimed:
            branch.claimed = Claimed(parent.claimed.context, dict(parent.claimed.homes))
        return branch

    def _signal(self, event: BranchEvent, branch: ModelBranch) -> None:
        if event.type is BranchEventType.END:
            self._end(event.branch, event.cascade, set())
        elif event.type is BranchEventType.COMPACT:
            version = branch.version + 1 if event.version is None else event.version
            if version > branch.version:
                branch.version, branch.fresh, branch.departed = version, True, []
        else:
            kinds = {BranchEventType.FORK: BranchKind.FORK, BranchEventType.SUBAGENT: BranchKind.SUBAGENT}
            had_parent = branch.parent is not None
            self._adopt(event, branch, kinds.get(event.type))
            parent = self.branches.get(branch.parent or "")
            gone = parent is not None and parent.state is BranchState.ENDED and parent.with_descendants
            if gone and not had_parent and not branch.prompt:
                self._end(event.branch, cascade=True, done=set())

    def _adopt(self, event: BranchEvent, branch: ModelBranch, kind: BranchKind | None) -> None:
        if kind not in (None, BranchKind.TRANSIENT) and branch.kind is BranchKind.MAIN:
            branch.kind = kind
        if event.parent is not None and branch.parent is None and event.parent != event.branch:
            branch.parent = event.parent

    def _end(self, name: str, cascade: bool, done: set[str]) -> None:
        done.add(name)
        branch = self.branches[name]
        branch.life += branch.state is not BranchState.ENDED
        branch.state, branch.departed = BranchState.ENDED, []
        branch.with_descendants = cascade
        self._unclaim(branch)
        for child, other in self.branches.items():
            if cascade and other.parent == name and child not in done:
                self._end(child, cascade, done)

    def _unclaim(self, branch: ModelBranch) -> None:
        branch.claimed = None
        branch.kept.clear()

    def judge(
        self, branch: ModelBranch, version: int | None, prompt: Context, said: BranchEvent | MatchQuery | None = None
    ) -> tuple[str, int]:
        """(what a request is to its branch, the version the branch has with it); `said`: its kind and compaction."""
        if said is not None and said.kind is BranchKind.TRANSIENT:
            return "transient", branch.version
        if branch.state is BranchState.ENDED:
            return "opens", branch.version if version is None else version
        kinds = {BranchKind.MAIN: "opens", BranchKind.FORK: "fork", BranchKind.SUBAGENT: "subagent"}
        first = kinds[branch.kind] if not branch.opened and branch.fresh else "compact"
        if version is not None and version != branch.version:
            return ("transient", branch.version) if version < branch.version else (first, version)
        told = not isinstance(said, BranchEvent) or said.life is None
        if said is not None and told and said.compaction is Compaction.DONE and not branch.fresh:
            return "compact", branch.version + 1
        if branch.fresh:
            return first, branch.version
        if extends(branch.prompt, prompt):
            return "extends", branch.version
        if branch.compacting:
            return "compact", branch.version + 1
        if self._departs(branch, prompt) is None:
            return "transient", branch.version
        if branch.prompt and not branch.grown and len(branch.prompt) < len(prompt):
            return kinds[branch.kind], branch.version
        return "compact", branch.version + 1

    def _departs(self, branch: ModelBranch, prompt: Context) -> tuple[int, Context] | None:
        found = (d for d in branch.departed if len(prompt) > d[0] and prompt[: len(d[1])] == d[1])
        return next(found, None)

    def _context(self, event: BranchEvent, context: Context, now: float) -> None:
        branch = self.branches.get(event.branch)
        if branch is None:
            branch = self.branches[event.branch] = ModelBranch(event.version or 0, now)
        if branch.state is BranchState.ACTIVE:
            branch.seen = now
        self._adopt(event, branch, event.kind or {kind.value: kind for kind in OPENED}.get(event.lineage))
        self.known.update(keys_of(context)[event.base_blocks :])
        prompt = context if event.prompt_blocks is None else context[: event.prompt_blocks]
        was_ended = branch.state is BranchState.ENDED
        lineage, version = self.judge(branch, event.version, prompt, event)
        mark = (len(prompt), must_come_back(prompt))
        if lineage == "transient":
            if prompt and mark not in branch.departed:
                branch.departed = [mark, *branch.departed][:4]
            branch.compacting = branch.compacting or event.compaction is Compaction.SUMMARY
            if was_ended:
                branch.state, branch.seen = BranchState.ACTIVE, now
            return
        departs = None if was_ended else self._departs(branch, prompt)
        explicit = event.version is not None and event.version > branch.version
        done = event.life is None and event.compaction is Compaction.DONE
        if not explicit and (branch.fresh or lineage == "extends" or (branch.compacting and not done)):
            departs = None
        branch.grown, branch.compacting = lineage == "extends" or departs is not None, False
        if departs is not None and branch.prompt:
            left = [(len(branch.prompt), must_come_back(branch.prompt)), *branch.departed]
            branch.departed = [d for d in left if d != departs][:4]
        elif lineage != "extends":
            branch.departed = []
        branch.version, branch.prompt, branch.fresh = version, prompt, False
        branch.opened = bool(prompt)
        branch.life = max(branch.life, event.life or 0)
        branch.state, branch.seen = BranchState.ACTIVE, now
        former = branch.claimed.homes if branch.claimed is not None else dict.fromkeys(PHASES)
        prefill = event.prefill_node or former[Phase.PREFILL]
        decode = event.decode_node or former[Phase.DECODE]
        branch.kept.clear()
        homes = {Phase.PREFILL: prefill, Phase.DECODE: decode}
        branch.claimed = Claimed(context, homes) if context else None
