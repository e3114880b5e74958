"""Media of a leg in SGLang's words: its own processor lays them out again, under the hash that our keys follow from."""

from array import array
from collections.abc import Sequence
from typing import Any

from schemas.media import HASH_BYTES, Medium


def unexpanded(tokens: bytes, media: Sequence[Medium]) -> list[int]:
    """A prompt as its chat template wrote it: one placeholder for each medium."""
    found, at = array("I"), 0
    whole = array("I", tokens)
    for medium in sorted(media, key=lambda medium: medium.first):
        found += whole[at : medium.first]
        found.append(medium.placeholder)
        at = medium.first + medium.tokens
    return (found + whole[at:]).tolist()


def media_begun(request: Any, before: int, new: int, *, first: bool) -> int:
    """Media of SGLang's request that a batch over its tokens [before, before + new) is the first to compute a token of:
    SGLang encodes them in it, unless it still has their embeddings. `first`: the request was in no batch before."""
    inputs = request.multimodal_inputs
    spans = [(item.offsets[0][0], item.offsets[-1][1]) for item in inputs.mm_items if item.offsets] if inputs else []
    return sum(start < before + new and (end >= before if first else start >= before) for start, end in spans)


def media_arguments(tokens: bytes, media: Sequence[Medium], data: Sequence[bytes]) -> dict[str, Any]:
    """The fields of SGLang's request that carry media; `data` in the order of `media`."""
    return {
        "input_ids": unexpanded(tokens, media),
        "image_data": list(data),
        "mm_hashes": [medium.sha256[:HASH_BYTES].hex() for medium in media],
    }
