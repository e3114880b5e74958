"""What the naive model of a pool is made of: contexts that share prefixes, blocks, holds."""

import hashlib
from dataclasses import dataclass, field

from schemas.block_key import short_key
from schemas.kv import NEUTRAL, LocationChange, keys_of


def digest_of(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def branching_contexts() -> list[list[bytes]]:
    """Contexts that share prefixes: a trunk of three blocks and forks of it at every depth."""
    trunk = ["trunk0", "trunk1", "trunk2"]
    names = [trunk[:fork] + [f"{fork}{tail}{i}" for i in range(4)] for fork in range(1, 4) for tail in "xyz"]
    return [[digest_of(name) for name in context] for context in names]


def true_parents(change: LocationChange) -> bool:
    """Whether each key of a run really extends the one before it."""
    keys = keys_of(change.hashes).tolist()
    return all(KEY_PARENTS[key] == before for key, before in zip(keys, [change.parent, *keys], strict=False))


CONTEXTS = branching_contexts()
PARENTS = {digest: (context[i - 1] if i else b"") for context in CONTEXTS for i, digest in enumerate(context)}
KEY_PARENTS = {short_key(digest): short_key(parent) if parent else None for digest, parent in PARENTS.items()}
DIGESTS = sorted(PARENTS)


@dataclass
class Block:
    slot: int
    generation: int
    owner: int | None
    used_s: float
    depth: int
    referenced: bool = False
    unreachable: bool = False
    worth: dict[bool, int] = field(default_factory=lambda: {True: NEUTRAL, False: NEUTRAL})
    """By whether it is referenced."""


@dataclass
class Hold:
    owner: int | None
    expires_s: float
    slots: set[int] = field(default_factory=set)
