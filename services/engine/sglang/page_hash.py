"""Our block key in the place of SGLang's natively compiled page hash: one function everywhere, no compiler needed."""

from typing import Any

import numpy as np

from schemas.block_key import PAIRS, PLAIN, TOKEN_BYTES, block_digests


def page_digests(key: Any, prior_digest: bytes, page_size: int) -> list[bytes]:
    """The digest of every page of `key`, chained from `prior_digest`; a last page may be partial, as upstream allows.

    `key` is a sequence of tokens or SGLang's RadixKey, whose `is_bigram` asks for pairs.
    """
    raw = key.raw_token_ids() if hasattr(key, "raw_token_ids") else key
    pairs = bool(getattr(key, "is_bigram", False))
    version = PAIRS if pairs else PLAIN
    units = len(key)
    packed = np.asarray(raw, dtype=np.int64)[: units + pairs].astype("<u4").tobytes()
    whole = units // page_size * page_size
    digests = block_digests(packed[: TOKEN_BYTES * (whole + pairs)], page_size, prior_digest, version)
    if whole < units:
        parent = digests[-1] if digests else prior_digest
        digests += block_digests(packed[TOKEN_BYTES * whole :], units - whole, parent, version)
    return digests


def page_hashes(token_ids: Any, prior_digest: bytes | None, page_size: int | None = None) -> str | list[str]:
    """SGLang's `get_native_hash`: hex digests of the pages, or one digest of everything without `page_size`."""
    if page_size is None:
        return page_digests(token_ids, prior_digest or b"", max(1, len(token_ids)))[0].hex()
    return [digest.hex() for digest in page_digests(token_ids, prior_digest or b"", page_size)]
