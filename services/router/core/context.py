"""A context as the cluster names it: its tokens and the digests of its full blocks."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from schemas.block_key import TOKEN_BYTES, block_digests, full_blocks, pack_keys, short_key, token_bytes


@dataclass(frozen=True, slots=True)
class KeyScheme:
    """How blocks are named here: tokens per block, version of the key function, and the seed of the tenant's chain."""

    block_size: int
    version: str
    seed: bytes = b""


@dataclass(frozen=True, slots=True)
class Context:
    """Tokens (u32 little-endian) and one digest per full block."""

    scheme: KeyScheme
    packed: bytes
    digests: list[bytes] = field(repr=False)

    @classmethod
    def of(cls, packed: bytes, scheme: KeyScheme) -> "Context":
        return cls(scheme, packed, block_digests(packed, scheme.block_size, scheme.seed, scheme.version))

    @property
    def tokens(self) -> int:
        return len(self.packed) // TOKEN_BYTES

    def extended(self, tokens: Iterable[int]) -> "Context":
        """This context with more tokens; only the new blocks are hashed."""
        packed = self.packed + token_bytes(tokens)
        start = len(self.digests) * self.scheme.block_size * TOKEN_BYTES
        parent = self.digests[-1] if self.digests else self.scheme.seed
        more = block_digests(packed[start:], self.scheme.block_size, parent, self.scheme.version)
        return Context(self.scheme, packed, self.digests + more)

    def keys(self, first: int = 0, last: int | None = None) -> bytes:
        """Packed short keys of blocks [first, last)."""
        return pack_keys(self.digests[first:last])

    def key(self, block: int) -> int:
        """Short key of one block."""
        return short_key(self.digests[block])

    def check(self) -> None:
        """As many digests as full blocks."""
        assert len(self.digests) == full_blocks(self.tokens, self.scheme.block_size, self.scheme.version)
