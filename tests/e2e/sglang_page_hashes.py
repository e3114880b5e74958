"""Prints SGLang's own page hashes of the published block key vectors (JSON on stdin, JSON on stdout)."""

import json
import sys

from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str

from schemas.block_key import PAIRS, tenant_salt


def main() -> None:
    """Hash each case as SGLang's storage does, from its own namespace seed."""
    answers = []
    for case in json.load(sys.stdin):
        salt = tenant_salt(case["tenant"]) if case["tenant"] is not None else case["cache_salt"]
        key = RadixKey(
            case["tokens"], extra_key=case["extra_key"], cache_salt=salt, is_bigram=case["key_version"] == PAIRS
        )
        size = case["block_size"]
        answers.append(get_storage_hash_str(key.page_aligned(size), None, page_size=size))
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
