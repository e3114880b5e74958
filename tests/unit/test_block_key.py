"""The block key against its published vectors, SGLang's own rule, and what must not collide."""

import hashlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.block_key import (
    PAIRS,
    PLAIN,
    block_digests,
    full_blocks,
    namespace_seed,
    pack_keys,
    short_key,
    tenant_salt,
    token_bytes,
    token_list,
)

VECTORS: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "data" / "block_key_vectors.json").read_text())
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=200)


def sequence(count: int) -> list[int]:
    """The tokens of the vectors: reproducible in any language."""
    return [(i * 2_654_435_761 + 12_345) % 150_000 for i in range(count)]


def published(case: dict[str, Any]) -> list[str]:
    salt = tenant_salt(case["tenant"]) if case["tenant"] is not None else case["cache_salt"]
    seed = namespace_seed(case["extra_key"], salt)
    packed = token_bytes(case["tokens"] if case["tokens"] is not None else sequence(case["sequence"]))
    return [digest.hex() for digest in block_digests(packed, case["block_size"], seed, case["key_version"])]


@pytest.mark.parametrize("case", VECTORS, ids=[case["name"] for case in VECTORS])
def test_published_vectors(case: dict[str, Any]) -> None:
    digests = published(case)
    assert len(digests) == case["blocks"]
    assert digests[:3] == case["first_digests"]
    assert digests[-1:] == case["last_digest"]
    assert [short_key(bytes.fromhex(d)) for d in digests[:3]] == case["first_short_keys"]


def test_vectors_cover_every_kind() -> None:
    names = " ".join(case["name"] for case in VECTORS)
    assert [kind for kind in ("plain", "salt", "adapter", "salt+adapter", "tenant", "pairs") if kind not in names] == []


@given(tokens, st.integers(1, 16))
def test_a_chain_is_sha256_over_parent_and_tokens(given_tokens: list[int], size: int) -> None:
    parent, expected = b"", []
    for start in range(0, len(given_tokens) // size * size, size):
        text = b"".join(t.to_bytes(4, "little") for t in given_tokens[start : start + size])
        parent = hashlib.sha256(parent + text).digest()
        expected.append(parent)
    assert block_digests(token_bytes(given_tokens), size) == expected


@given(tokens, st.integers(1, 16), st.integers(0, 12))
def test_a_chain_may_be_continued_from_any_block(given_tokens: list[int], size: int, cut: int) -> None:
    packed = token_bytes(given_tokens)
    whole = block_digests(packed, size)
    cut = min(cut, len(whole))
    parent = whole[cut - 1] if cut else b""
    assert whole[:cut] + block_digests(packed[cut * size * 4 :], size, parent) == whole


@given(tokens, st.integers(1, 16))
def test_pairs_hash_each_token_with_its_follower(given_tokens: list[int], size: int) -> None:
    pairs = [token for pair in pairwise(given_tokens) for token in pair]
    digests = block_digests(token_bytes(given_tokens), size, key_version=PAIRS)
    assert digests == block_digests(token_bytes(pairs), 2 * size)
    assert len(digests) == full_blocks(len(given_tokens), size, PAIRS)


@given(st.integers(0, 10_000), st.integers(1, 128))
def test_full_blocks(count: int, size: int) -> None:
    assert full_blocks(count, size) == count // size
    assert full_blocks(count, size, PAIRS) == max(0, count - 1) // size


def test_an_unknown_key_version_is_named() -> None:
    with pytest.raises(ValueError, match="'sha256-u32-v9'"):
        block_digests(token_bytes([1, 2]), 1, key_version="sha256-u32-v9")


@given(tokens)
def test_tokens_go_there_and_back(given_tokens: list[int]) -> None:
    assert token_list(token_bytes(given_tokens)) == given_tokens


def test_half_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="7 bytes of tokens"):
        token_list(bytes(7))


def test_short_keys_are_big_endian_heads_packed_little_endian() -> None:
    digests = block_digests(token_bytes(sequence(64)), 16)
    packed = np.frombuffer(pack_keys(digests), dtype="<u8")
    assert packed.tolist() == [short_key(digest) for digest in digests]
    assert short_key(digests[0]) == int(digests[0].hex()[:16], 16)


def test_the_default_tenant_has_no_salt_and_no_seed() -> None:
    assert tenant_salt("") is None
    assert namespace_seed(None, tenant_salt("")) == b""


def test_case_55_base_and_adapter_share_no_block() -> None:
    packed = token_bytes(sequence(256))
    base = set(block_digests(packed, 16))
    assert base.isdisjoint(block_digests(packed, 16, namespace_seed("lora-a")))
    assert set(block_digests(packed, 16, namespace_seed("lora-a"))).isdisjoint(
        block_digests(packed, 16, namespace_seed("lora-b"))
    )


def test_case_57_tenants_share_no_block() -> None:
    packed = token_bytes(sequence(256))
    chains = [set(block_digests(packed, 16, namespace_seed(None, tenant_salt(name)))) for name in ("", "a", "b", "A")]
    assert len(set().union(*chains)) == sum(map(len, chains))


@given(st.text(max_size=20), st.text(max_size=20), st.text(max_size=20), st.text(max_size=20))
def test_framing_keeps_adapter_and_salt_apart(a: str, b: str, c: str, d: str) -> None:
    """Moving characters from one part to the other never gives the same seed; absent is not empty."""
    if (a, b) != (c, d):
        assert namespace_seed(a, b) != namespace_seed(c, d)
    assert namespace_seed(a, None) != namespace_seed(None, a)
    assert namespace_seed("", None) != namespace_seed(None, None)


def test_versions_share_no_block() -> None:
    packed = token_bytes(sequence(256))
    assert set(block_digests(packed, 16, key_version=PLAIN)).isdisjoint(block_digests(packed, 16, key_version=PAIRS))
