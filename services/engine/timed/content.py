"""What the timed engine computes: bytes of KV blocks and tokens, both functions of the context alone.

So every node gives the same answer to the same prompt, and a block with other bytes, or a token from another context,
is noticed wherever it turns up.
"""

import hashlib
from array import array

import numpy as np
import numpy.typing as npt

from schemas.block_key import block_digests, full_blocks, namespace_seed, token_bytes
from services.engine.backend import Leg

_STEP = np.uint64(0x9E3779B97F4A7C15)


def block_content(digest: bytes, size: int) -> npt.NDArray[np.uint8]:
    """The `size` bytes of KV of the block with this 32-byte digest; no two 8-byte words of a block are alike."""
    words = np.arange(-(-size // 8), dtype=np.uint64) * _STEP
    words ^= np.resize(np.frombuffer(digest, "<u8"), len(words))
    return words.view(np.uint8)[:size]


class Context:
    """The tokens of one leg, prompt and answer, with the digests of their full blocks."""

    def __init__(self, leg: Leg, block_size: int, key_version: str) -> None:
        self.tokens = array("I", leg.tokens)
        self.digests = list(leg.digests)
        self._block_size, self._key_version = block_size, key_version
        self._seed = namespace_seed(leg.extra_key, leg.cache_salt)

    def append(self, token: int) -> None:
        """The answer goes on by one token."""
        self.tokens.append(token)
        count = full_blocks(len(self.tokens), self._block_size, self._key_version)
        if count > len(self.digests):
            start = len(self.digests) * self._block_size
            parent = self.digests[-1] if self.digests else self._seed
            packed = self.tokens[start:].tobytes()
            self.digests += block_digests(packed, self._block_size, parent, self._key_version)

    def blocks_with_kv(self) -> int:
        """Full blocks whose tokens have all been fed: all but the newest token."""
        return min(len(self.digests), full_blocks(len(self.tokens) - 1, self._block_size, self._key_version))

    def next_number(self) -> int:
        """64 bits that follow from the whole context: the source of its next token."""
        head = self.digests[-1] if self.digests else self._seed
        tail = token_bytes(self.tokens[len(self.digests) * self._block_size :])
        return int.from_bytes(hashlib.sha256(head + tail).digest()[:8], "big")
