"""Media in a prompt: which of its tokens stand for them, what these are hashed as, and which blocks hold them.

A medium's placeholder tokens are hashed with the ids that SGLang 0.5.23 puts there, modulo 2^32: four numbers from the
first 8 bytes of the medium's sha256, one after the other, begun anew with every run of placeholders. So a block names
128 bits of what it shows, where four of its tokens are placeholders; the whole sha256 goes with it as `BlockMedia`.
"""

import hashlib
from array import array
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from schemas.block_key import PAIRS, PLAIN
from schemas.codec import Count, Positive
from schemas.kv import SHA256_BYTES, BlockMedia

HASH_BYTES = 8
"""So much of a sha256 is the hash by which SGLang knows a medium."""
_TAG = b"sglang-mm-wide-pad-v1"
_SHIFT, _MASK = 1_000_000, (1 << 62) - 1


class Medium(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [first, first + tokens) of a prompt are what the model's processor makes of one medium of `size` bytes.

    A chat template writes the one token `placeholder` in their place.
    """

    first: Count
    tokens: Positive
    sha256: Annotated[bytes, Meta(min_length=SHA256_BYTES, max_length=SHA256_BYTES)]
    size: Count
    placeholder: Count

    def __post_init__(self) -> None:
        if len(self.sha256) != SHA256_BYTES:
            raise ValueError(f"a sha256 of {len(self.sha256)} bytes, {SHA256_BYTES} are expected")


def placeholder_ids(sha256: bytes, count: int) -> bytes:
    """What `count` placeholders in a row are hashed as (u32 little-endian)."""
    digest = hashlib.sha256(_TAG + sha256[:HASH_BYTES]).digest()
    wide = (int.from_bytes(digest[at : at + 8], "big") & _MASK for at in range(0, len(digest), 8))
    ids = array("I", [(_SHIFT + number) & 0xFFFFFFFF for number in wide])
    return (ids * -(-count // len(ids)))[:count].tobytes()


def block_media(media: Iterable[Medium], blocks: int, block_size: int, key_version: str = PLAIN) -> list[BlockMedia]:
    """Which of the first `blocks` blocks of a prompt hold media, and which ones, in order."""
    reach = block_size + (key_version == PAIRS)
    found: dict[int, list[bytes]] = {}
    for medium in sorted(media, key=lambda medium: medium.first):
        begun = max(0, medium.first - reach + block_size) // block_size
        ended = (medium.first + medium.tokens - 1) // block_size
        for block in range(begun, min(ended + 1, blocks)):
            found.setdefault(block, []).append(medium.sha256)
    return [BlockMedia(block, b"".join(found[block])) for block in sorted(found)]
