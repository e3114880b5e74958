"""Media of a leg in SGLang's words: its own processor lays them out again, under the hash that our keys follow from.

SGLang takes such hashes with a request too, but not for all models: Kimi's refuse them, and Qwen3-VL's prompt has been
hashed by then, so that the engine ends. They are given to what the processor made instead.
"""

import io
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from schemas.media import HASH_BYTES, Medium

_ORIENTATION = 0x0112


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
        "image_data": [upright(one) for one in data],
    }


def upright(data: bytes) -> bytes:
    """An image as it is looked at: SGLang's processors do not turn one whose file says that it lies on its side."""
    if not any(word in data for word in (b"xif", b"XIF", b"XIf", b"rientation")):
        return data
    from PIL import Image, ImageOps

    image = Image.open(io.BytesIO(data))
    if image.getexif().get(_ORIENTATION, 1) == 1:
        return data
    turned, target = ImageOps.exif_transpose(image), io.BytesIO()
    if turned.mode not in ("L", "RGB", "RGBA"):
        turned = turned.convert("RGB")
    turned.save(target, "PNG", compress_level=1)
    return target.getvalue()


def place(made: Any, tokens: bytes, media: Sequence[Medium]) -> str:
    """Have what SGLang's processor made of a prompt hashed as `tokens` are. What differs all the same, or "": then the
    answer is as good, but nothing from the first medium on is found again."""
    if len(made.mm_items) != len(media):
        return f"{len(media)} media are {len(made.mm_items)} items"
    items = made.mm_items
    for item, medium in zip(items, sorted(media, key=lambda medium: medium.first), strict=True):
        item.set_hash(int.from_bytes(medium.sha256[:HASH_BYTES], "big"))
    padded = made.build_padded_input_ids(made.input_ids, items)
    if padded is None:
        return "it does not say where media stand"
    if made.padded_input_ids is not None:
        made.padded_input_ids = padded
    found, expected = np.asarray(padded, np.int64).astype("<u4"), np.frombuffer(tokens, "<u4")
    if len(found) != len(expected):
        return f"the prompt has {len(found)} tokens instead of {len(expected)}"
    other = np.flatnonzero(found != expected)
    return f"token {other[0]} of the prompt is {found[other[0]]} instead of {expected[other[0]]}" if len(other) else ""


ALIKE = (
    "SGLang keys all images of this model alike, so that one would be answered from another's KV: it takes text only"
)
_TRANSFORMERS = "TransformersAutoMultimodalProcessor"
"""The processor of models that SGLang does not know itself: their placeholders stay as they are, and their processor
takes no tokens."""


def alike(request: Any) -> bool:
    """Whether SGLang's request shows a medium that left no mark in its tokens: another one would find its KV."""
    inputs, tokens = request.multimodal_inputs, request.origin_input_ids
    if inputs is None:
        return False
    for item in inputs.mm_items:
        ids, first = set(item.padding_values()), item.offsets[0][0] if item.offsets else 0
        if not (first < len(tokens) and tokens[first] in ids) and ids.isdisjoint(tokens):
            return True
    return False


class Placer:
    """Stands between SGLang and its processor of media; media of prompts it was not told of stay as they are.

    `warn` is told the first time that a prompt will not be hashed as ours.
    """

    def __init__(self, processor: Any, warn: Callable[[str], object]) -> None:
        self._warn = warn
        self._name = type(processor).__name__
        self._process = processor.process_mm_data_async
        self._prompts: dict[str, tuple[bytes, Sequence[Medium]]] = {}
        self._warned = False
        processor.process_mm_data_async = self._placed

    def expect(self, rid: str, tokens: bytes, media: Sequence[Medium]) -> None:
        """This request shows these media; until `forget`."""
        if media:
            self._prompts[rid] = tokens, media

    def forget(self, rid: str) -> None:
        """The request is out."""
        self._prompts.pop(rid, None)

    async def _placed(self, *arguments: Any, request_obj: Any, **rest: Any) -> Any:
        if self._name == _TRANSFORMERS:
            raise ValueError(ALIKE)
        made = await self._process(*arguments, request_obj=request_obj, **rest)
        prompt = self._prompts.get(request_obj.rid)
        if made is not None and prompt is not None:
            differs = place(made, *prompt)
            if differs and not self._warned:
                self._warned = True
                self._warn(f"media are not found again: {self._name} lays them out otherwise, {differs}")
        return made
