"""Branches as their requests show them, message by message: what each request is to its branch, and what to say of it.

The same rules as the directory's, on whole messages instead of blocks: a request extends its branch when it holds all
messages of the branch's last prompt; one that does not, and carries no signal, is transient until another extends it.
"""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from schemas.branch import BranchEventType, BranchKind, Compaction, next_version
from services.router.core.identity import Identity
from services.router.core.identity_claims import MAX_BRANCH_CHARACTERS

KEEPALIVE_S: Final = 300.0
DEPARTED_KEPT: Final = 4
_DIGEST_BYTES: Final = 8
Key = tuple[str, str]
"""(tenant, branch)."""


class Said(NamedTuple):
    """An event to publish."""

    branch: str
    type: BranchEventType
    parent: str | None = None
    version: int | None = None


class Chain(NamedTuple):
    """A prompt: per part the chained digest up to it, and how many characters there are up to it."""

    digests: tuple[bytes, ...]
    characters: tuple[int, ...]

    @classmethod
    def of(cls, parts: list[str]) -> "Chain":
        digests, characters, digest, total = [], [], b"", 0
        for part in parts:
            digest = hashlib.sha256(digest + part.encode(errors="surrogatepass")).digest()[:_DIGEST_BYTES]
            total += len(part)
            digests.append(digest)
            characters.append(total)
        return cls(tuple(digests), tuple(characters))

    def extends(self, other: "Chain") -> bool:
        """Whether it holds all parts of `other`."""
        count = len(other.digests)
        return not count or (count <= len(self.digests) and self.digests[count - 1] == other.digests[-1])

    def shared(self, other: "Chain") -> int:
        """How many leading parts both have."""
        pairs = enumerate(zip(self.digests, other.digests, strict=False))
        return next((i for i, (a, b) in pairs if a != b), min(len(self.digests), len(other.digests)))


EMPTY: Final = Chain((), ())


@dataclass
class Conversation:
    """One branch. `stable`: characters of former prompts that came back as a prefix, of `compared` in all."""

    branch: str
    parent: str | None = None
    kind: BranchKind = BranchKind.MAIN
    version: int = 0
    inferred: bool = False
    dialect: str = ""
    ended: bool = False
    requests: int = 0
    side_requests: int = 0
    compared: int = 0
    stable: int = 0
    seen: float = 0.0
    said: float = 0.0
    grown: bool = False
    compacting: bool = False
    last: Chain = EMPTY
    departed: list[Chain] = field(default_factory=list)

    @property
    def stability(self) -> float | None:
        """Share of each prompt that came back at the front of the next one; None before the second request."""
        return self.stable / self.compared if self.compared else None


class Observation(NamedTuple):
    """What a request was: its branch, what it was to it, and the events that follow."""

    conversation: Conversation
    lineage: str
    events: list[Said]


class Conversations:
    """The last `capacity` branches."""

    def __init__(self, capacity: int = 10_000) -> None:
        self.capacity = capacity
        self._known: OrderedDict[Key, Conversation] = OrderedDict()
        self._inferred: dict[tuple[str, str | None, bytes], Key] = {}

    def listed(self) -> list[Conversation]:
        """Newest first."""
        return list(reversed(self._known.values()))

    def observe(self, identity: Identity, parts: list[str], now: float) -> Observation:
        """A request with this prompt. Times in monotonic seconds."""
        chain = Chain.of(parts)
        found = self._find(identity, chain)
        events: list[Said] = []
        if found is None:
            found = self._open(identity, chain, events)
        found.seen, found.dialect = now, identity.dialect
        lineage = self._judge(found, identity, chain, events)
        if lineage == "transient":
            found.side_requests += 1
        else:
            self._accept(found, identity, chain, lineage)
        if identity.end:
            events.append(Said(found.branch, BranchEventType.END))
        elif not events and now - found.said >= KEEPALIVE_S and not found.ended:
            events.append(Said(found.branch, BranchEventType.KEEPALIVE))
        if events:
            found.said = now
        found.ended = identity.end
        self._known.move_to_end((identity.tenant, found.branch))
        self._bound()
        return Observation(found, lineage, events)

    def _find(self, identity: Identity, chain: Chain) -> Conversation | None:
        if identity.branch is not None:
            return self._known.get((identity.tenant, identity.branch))
        for digest in reversed(chain.digests):
            key = self._inferred.get((identity.tenant, identity.family, digest))
            if key is not None:
                return self._known[key]
        return None

    def _open(self, identity: Identity, chain: Chain, events: list[Said]) -> Conversation:
        name = identity.branch
        if name is None:
            first = hashlib.sha256(b"".join(chain.digests[-1:])).hexdigest()[:12]
            name = f"{(identity.family or 'gateway')[: MAX_BRANCH_CHARACTERS - len(first) - 1]}/{first}"
        found = Conversation(name, identity.parent, inferred=identity.branch is None)
        if identity.kind not in (None, BranchKind.TRANSIENT):
            found.kind = identity.kind or BranchKind.MAIN
        elif identity.parent is not None:
            above = self._known.get((identity.tenant, identity.parent))
            forks = above is not None and bool(above.last.digests) and chain.extends(above.last)
            found.kind = BranchKind.FORK if forks else BranchKind.SUBAGENT
        found.version = identity.version or 0
        self._known[identity.tenant, name] = found
        kinds = {BranchKind.FORK: BranchEventType.FORK, BranchKind.SUBAGENT: BranchEventType.SUBAGENT}
        kind = kinds.get(found.kind, BranchEventType.OPEN) if found.parent is not None else BranchEventType.OPEN
        events.append(Said(name, kind, found.parent, found.version or None))
        return found

    def _judge(self, found: Conversation, identity: Identity, chain: Chain, events: list[Said]) -> str:
        if identity.kind is BranchKind.TRANSIENT:
            found.departed = [chain, *found.departed][:DEPARTED_KEPT]
            found.compacting = found.compacting or identity.compaction is Compaction.SUMMARY
            return "transient"
        if identity.version is not None and identity.version < found.version:
            return "transient"
        version = found.version if identity.version is None else identity.version
        departs = next((old for old in found.departed if old.digests and chain.extends(old)), None)
        extends = chain.extends(found.last)
        if found.last.digests and version == found.version and not extends:
            longer = not found.grown and chain.characters and chain.characters[-1] > found.last.characters[-1]
            if identity.compaction is Compaction.DONE or found.compacting or (departs is not None and not longer):
                version = next_version(version)
            elif departs is None:
                found.departed = [chain, *found.departed][:DEPARTED_KEPT]
                return "transient"
        if version > found.version:
            found.version = version
            events.append(Said(found.branch, BranchEventType.COMPACT, None, version))
            return "compact"
        return "extends" if extends and found.last.digests else "opens"

    def _accept(self, found: Conversation, identity: Identity, chain: Chain, lineage: str) -> None:
        key = (identity.tenant, found.branch)
        if found.last.digests:
            shared = chain.shared(found.last)
            found.compared += found.last.characters[-1]
            found.stable += found.last.characters[shared - 1] if shared else 0
        if found.inferred:
            self._forget(found, identity)
        found.grown, found.compacting = lineage == "extends", False
        found.requests += 1
        found.last, found.departed = chain, [] if lineage == "extends" else found.departed
        if found.inferred and chain.digests:
            self._inferred[identity.tenant, identity.family, chain.digests[-1]] = key

    def _forget(self, found: Conversation, identity: Identity) -> None:
        if found.last.digests:
            place = (identity.tenant, identity.family, found.last.digests[-1])
            if self._inferred.get(place) == (identity.tenant, found.branch):
                del self._inferred[place]

    def _bound(self) -> None:
        while len(self._known) > self.capacity:
            key, _ = self._known.popitem(last=False)
            self._inferred = {place: owner for place, owner in self._inferred.items() if owner != key}

    def check(self) -> None:
        """Every inferred prompt leads to a branch that is known; counts are sums of parts."""
        assert len(self._known) <= self.capacity
        assert all(owner in self._known for owner in self._inferred.values())
        for (_, name), found in self._known.items():
            assert found.branch == name
            assert 0 <= found.stable <= found.compared
