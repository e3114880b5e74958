"""The one block key: a sha256 chain over tokens as little-endian u32, equal to SGLang's page hash for plain text.

Tenants and adapters start their chains from SGLang's own namespace seed: its storage hashes are these very keys.
Published vectors: tests/data/block_key_vectors.json.
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence

TOKEN_BYTES = 4
PLAIN = "sha256-u32-v1"
PAIRS = "sha256-u32-pairs-v1"
_NAMESPACE = b"sglang-cache-namespace-v1"


def _framed(part: str | None) -> bytes:
    if part is None:
        return b"\0"
    text = part.encode()
    return b"\1" + len(text).to_bytes(8, "little") + text


def tenant_salt(tenant: str) -> str | None:
    """The cache salt of a tenant: None for the default tenant (""), else the hex digest of its framed name."""
    return hashlib.sha256(_framed(tenant)).hexdigest() if tenant else None


def namespace_seed(extra_key: str | None = None, cache_salt: str | None = None) -> bytes:
    """The digest a chain starts from; b"" when neither an adapter nor a salt is given."""
    if extra_key is None and cache_salt is None:
        return b""
    return hashlib.sha256(_NAMESPACE + _framed(extra_key) + _framed(cache_salt)).digest()


def token_bytes(tokens: Iterable[int]) -> bytes:
    """Tokens as the wire carries them: u32 little-endian."""
    return array("I", tokens).tobytes()


def token_list(packed: bytes) -> list[int]:
    """The inverse of `token_bytes`; ValueError unless whole tokens."""
    if len(packed) % TOKEN_BYTES:
        raise ValueError(f"{len(packed)} bytes of tokens are not a multiple of {TOKEN_BYTES}")
    return array("I", packed).tolist()


def full_blocks(tokens: int, block_size: int, key_version: str = PLAIN) -> int:
    """How many whole blocks `tokens` tokens give: n // size, or (n - 1) // size over pairs."""
    return max(0, tokens - (key_version == PAIRS)) // block_size


def block_digests(packed: bytes, block_size: int, parent: bytes = b"", key_version: str = PLAIN) -> list[bytes]:
    """The 32-byte digest of every full block of `packed` (u32 little-endian tokens), chained from `parent`.

    `parent` is the namespace seed at the start of a context, or the digest of the block before the first token.
    """
    source, step = packed, block_size * TOKEN_BYTES
    if key_version == PAIRS:
        source, step = _pairs(packed), 2 * block_size * TOKEN_BYTES
    elif key_version != PLAIN:
        raise ValueError(f"key version {key_version!r} is neither {PLAIN!r} nor {PAIRS!r}")
    view = memoryview(source)
    digests: list[bytes] = []
    for start in range(0, len(source) // step * step, step):
        parent = hashlib.sha256(parent + view[start : start + step]).digest()
        digests.append(parent)
    return digests


def _pairs(packed: bytes) -> bytes:
    tokens = array("I", packed)
    pairs = array("I", bytes(8 * max(0, len(tokens) - 1)))
    pairs[0::2], pairs[1::2] = tokens[:-1], tokens[1:]
    return pairs.tobytes()


def short_key(digest: bytes) -> int:
    """The uint64 that stands for a digest on the wire: its first 8 bytes, big-endian."""
    return int.from_bytes(digest[:8], "big")


def pack_keys(digests: Sequence[bytes]) -> bytes:
    """Short keys packed as little-endian uint64."""
    return b"".join(digest[7::-1] for digest in digests)
