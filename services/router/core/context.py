"""A context as the cluster names it: its tokens and the digests of its full blocks."""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from schemas.block_key import TOKEN_BYTES, block_digests, full_blocks, pack_keys, short_key, token_bytes
from schemas.kv import BlockMedia
from schemas.media import Medium, block_media

_KEY_BYTES = 8


@dataclass(frozen=True, slots=True)
class KeyScheme:
    """How blocks are named here: tokens per block, version of the key function, and the seed of the tenant's chain."""

    block_size: int
    version: str
    seed: bytes = b""


@dataclass(frozen=True, slots=True)
class Context:
    """Tokens (u32 little-endian), one digest per full block, the packed short keys of these, and the media in it."""

    scheme: KeyScheme
    packed: bytes
    digests: list[bytes] = field(repr=False)
    packed_keys: bytes = field(repr=False)
    media: tuple[Medium, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, packed: bytes, scheme: KeyScheme) -> "Context":
        digests = block_digests(packed, scheme.block_size, scheme.seed, scheme.version)
        return cls(scheme, packed, digests, pack_keys(digests))

    @property
    def tokens(self) -> int:
        return len(self.packed) // TOKEN_BYTES

    @property
    def media_ends(self) -> tuple[int, ...]:
        """Where its media end, in order."""
        return tuple(sorted(medium.first + medium.tokens for medium in self.media))

    def media_beyond(self, tokens: int) -> int:
        """How many of its media do not end within its first `tokens` tokens."""
        return len(self.media) - bisect_right(self.media_ends, tokens)

    def extended(self, tokens: Iterable[int]) -> "Context":
        """This context with more tokens; only the new blocks are hashed."""
        made = self.branched(self.packed + token_bytes(tokens), len(self.digests))
        return replace(made, media=self.media) if self.media else made

    def branched(self, packed: bytes, blocks: int) -> "Context":
        """The context of `packed`, of which the first `blocks` blocks are this one's; only the others are hashed."""
        scheme, known = self.scheme, self.digests[:blocks]
        parent = known[-1] if known else scheme.seed
        rest = memoryview(packed)[blocks * scheme.block_size * TOKEN_BYTES :].tobytes()
        more = block_digests(rest, scheme.block_size, parent, scheme.version)
        keys = self.packed_keys[: blocks * _KEY_BYTES] + pack_keys(more)
        return Context(scheme, packed, known + more, keys)

    def keys(self, first: int = 0, last: int | None = None) -> bytes:
        """Packed short keys of blocks [first, last)."""
        return self.packed_keys[first * _KEY_BYTES : None if last is None else last * _KEY_BYTES]

    def key(self, block: int) -> int:
        """Short key of one block."""
        return short_key(self.digests[block])

    def block_media(self) -> list[BlockMedia]:
        """Which blocks hold media, and which ones."""
        if not self.media:
            return []
        return block_media(self.media, len(self.digests), self.scheme.block_size, self.scheme.version)

    def check(self) -> None:
        """As many digests and keys as full blocks."""
        assert len(self.digests) == full_blocks(self.tokens, self.scheme.block_size, self.scheme.version)
        assert self.packed_keys == pack_keys(self.digests)
