"""Media in prompts: ids of placeholders, blocks that hold media, and where layouts stand."""

import hashlib
import io
import json
import os
import subprocess
import sys
from array import array
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.block_key import PAIRS, PLAIN, full_blocks, token_bytes, token_list
from schemas.kv import BlockMedia
from schemas.media import Medium, block_media, placeholder_ids
from services.engine.sglang.media import Placer, alike, media_arguments, upright
from services.router.text.layout import Image, Layout, NotLaidOut, Shown, expanded, laid_out

CAT, DOG = (hashlib.sha256(name).digest() for name in (b"cat", b"dog"))
PAD, OPEN, CLOSE = 7, 8, 9
ROOT = Path(__file__).parents[2]
STUBS = ROOT / "services" / "engine" / "sglang" / "cpu_stubs"
SHA = {b"c": CAT, b"d": DOG}


def shown(data: bytes, rows: list[int]) -> Shown:
    """An image of `rows` runs of placeholders, each after an opening token, and one closing token."""
    tokens = [token for row in rows for token in (OPEN, *[PAD] * row)] + [CLOSE]
    text = "".join({OPEN: "<o>", PAD: "<p>", CLOSE: "<c>"}[token] for token in tokens)
    return Shown(Image(data, SHA[data], f"part {data!r}"), Layout(text, token_bytes(tokens), "<p>", PAD))


def test_placeholders_are_hashed_with_four_ids_of_the_sha256_in_turn() -> None:
    assert token_list(placeholder_ids(CAT, 6)) == [675605754, 3423965138, 287011159, 276207098, 675605754, 3423965138]
    assert placeholder_ids(CAT, 3) == placeholder_ids(CAT, 5)[:12]
    assert not set(token_list(placeholder_ids(CAT, 4))) & set(token_list(placeholder_ids(DOG, 4)))


ASK_SGLANG = """
import asyncio, json, sys
from types import SimpleNamespace
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput
from schemas.block_key import token_bytes
from schemas.media import Medium, placeholder_ids
from services.engine.sglang.media import Placer, place

CAT, DOG = (bytes.fromhex(digest) for digest in sys.argv[1:])
MEDIA = [Medium(1, 6, CAT, 3, 7), Medium(8, 3, DOG, 3, 7)]
OURS = token_bytes([1]) + placeholder_ids(CAT, 2) + token_bytes([9]) + placeholder_ids(CAT, 3) + token_bytes([2])
OURS += placeholder_ids(DOG, 3) + token_bytes([3])
OFFSETS = [[(1, 2), (4, 6)], [(8, 10)]]

def made(offsets=OFFSETS, tokens=(1, 7, 7, 9, 7, 7, 7, 2, 7, 7, 7, 3)):
    items = [MultimodalDataItem(modality=Modality.IMAGE, offsets=offset) for offset in offsets]
    for item in items:
        item.set_hash(5)
    padded = MultimodalProcessorOutput.build_padded_input_ids(list(tokens), items)
    return MultimodalProcessorOutput(mm_items=items, input_ids=list(tokens), padded_input_ids=padded)

whole = made()
said = [place(whole, OURS, MEDIA)]
said.append(token_bytes([number % (1 << 32) for number in whole.padded_input_ids]) == OURS)
other = [1, 7, 7, 9, 7, 7, 7, 2, 7, 7, 7]
said += [place(made(tokens=other), OURS, MEDIA), place(made(tokens=[*other, 4]), OURS, MEDIA)]
bundled = made([[(1, 2), (4, 6), (8, 10)]])
said += [place(bundled, OURS, MEDIA), bundled.mm_items[0].hash]

class Processor:
    async def process_mm_data_async(self, *, request_obj):
        return made()

processor, warnings = Processor(), []
placer = Placer(processor, warnings.append)
placer.expect("a", OURS, MEDIA)
placer.expect("b", OURS[:-4], MEDIA)
for rid in ("a", "b", "b", "c"):
    asked = asyncio.run(processor.process_mm_data_async(request_obj=SimpleNamespace(rid=rid)))
    said.append(asked.mm_items[0].hash == int.from_bytes(CAT[:8], "big"))
print(json.dumps([*said, warnings]))
"""


@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed (extra `engine`)")
@pytest.mark.timeout(120)
def test_sglang_hashes_a_prompt_with_media_as_we_do_whatever_its_processor_had_begun_with() -> None:
    path = [str(STUBS), str(ROOT)] if find_spec("torchvision") is None else [str(ROOT)]
    asked = subprocess.run(
        [sys.executable, "-c", ASK_SGLANG, CAT.hex(), DOG.hex()],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(asked.stdout.splitlines()[-1]) == [
        "",
        True,
        "the prompt has 11 tokens instead of 12",
        "token 11 of the prompt is 4 instead of 3",
        "2 media are 1 items",
        5,
        *(True, True, True, False),
        ["media are not found again: Processor lays them out otherwise, the prompt has 12 tokens instead of 11"],
    ]


def test_a_medium_that_leaves_no_mark_in_the_tokens_is_noticed() -> None:
    """SGLang's models that leave placeholders as they are would answer one image from the KV of another."""

    def asked(tokens: list[int], offset: int | None) -> SimpleNamespace:
        item = SimpleNamespace(
            padding_values=lambda: (71, 72), offsets=None if offset is None else [(offset, offset + 2)]
        )
        return SimpleNamespace(origin_input_ids=array("q", tokens), multimodal_inputs=SimpleNamespace(mm_items=[item]))

    assert not alike(SimpleNamespace(origin_input_ids=array("q", [1]), multimodal_inputs=None))
    assert not alike(asked([1, 71, 72, 71], 1))
    assert not alike(asked([71, 72, 1, PAD], 2)), "put somewhere else"
    assert not alike(asked([1, 72], None))
    assert alike(asked([1, PAD, PAD, PAD], 1))
    assert alike(asked([1], 4))


async def test_a_model_that_sglang_does_not_know_itself_takes_no_images() -> None:
    class TransformersAutoMultimodalProcessor:
        async def process_mm_data_async(self, **_rest: Any) -> None:
            raise AssertionError("not reached")

    processor = TransformersAutoMultimodalProcessor()
    Placer(processor, print)
    with pytest.raises(ValueError, match="it takes text only"):
        await processor.process_mm_data_async(request_obj=SimpleNamespace(rid="a"))


def test_no_hash_goes_with_a_request_that_sglang_may_refuse_for_it() -> None:
    assert "mm_hashes" not in media_arguments(b"", [Medium(0, 1, CAT, 3, PAD)], [b"cat"])


@pytest.mark.parametrize(("kind", "mode"), [("JPEG", "RGB"), ("JPEG", "CMYK"), ("PNG", "P"), ("WEBP", "RGBA")])
def test_an_image_that_lies_on_its_side_is_turned_as_the_router_lays_it_out(kind: str, mode: str) -> None:
    library = pytest.importorskip("PIL.Image", reason="Pillow is not installed (extra `engine`)")
    image, said, target = library.new("RGB", (64, 32), (9, 0, 0)).convert(mode), library.Exif(), io.BytesIO()
    image.save(target, kind)
    assert upright(target.getvalue()) == target.getvalue()
    for orientation, size in ((1, (64, 32)), (6, (32, 64)), (3, (64, 32))):
        said[0x0112] = orientation
        target = io.BytesIO()
        image.save(target, kind, exif=said)
        turned = upright(target.getvalue())
        assert library.open(io.BytesIO(turned)).size == size
        assert (turned == target.getvalue()) == (orientation == 1)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30), st.sampled_from([CAT, DOG])), max_size=4),
    st.integers(1, 9),
    st.sampled_from([PLAIN, PAIRS]),
)
def test_a_block_holds_the_media_whose_tokens_it_hashes(
    spans: list[tuple[int, int, bytes]], size: int, version: str
) -> None:
    media = [Medium(first, count, sha, 1, PAD) for first, count, sha in spans]
    blocks = full_blocks(60, size, version)
    naive: dict[int, bytes] = {}
    for block in range(blocks):
        hashed = range(block * size, (block + 1) * size + (version == PAIRS))
        for medium in sorted(media, key=lambda medium: medium.first):
            if set(hashed) & set(range(medium.first, medium.first + medium.tokens)):
                naive[block] = naive.get(block, b"") + medium.sha256
    assert block_media(media, blocks, size, version) == [BlockMedia(block, sha) for block, sha in naive.items()]


def test_images_stand_where_the_template_shows_them() -> None:
    cat, dog = shown(b"c", [2, 1]), shown(b"d", [3])
    assert expanded("a<p>b<p>", [cat, dog]) == "a<o><p><p><o><p><c>b<o><p><p><p><c>"
    packed = token_bytes([1, *token_list(cat.layout.packed), 2, *token_list(dog.layout.packed)])
    prompt = laid_out(packed, [cat, dog])
    c, d = token_list(placeholder_ids(CAT, 2)), token_list(placeholder_ids(DOG, 3))
    assert token_list(prompt.packed) == [1, OPEN, *c, OPEN, c[0], CLOSE, 2, OPEN, *d, CLOSE]
    assert prompt.media == (Medium(1, 6, CAT, 1, PAD), Medium(8, 5, DOG, 1, PAD))
    assert prompt.data == (b"c", b"d")
    back = media_arguments(prompt.packed, prompt.media, prompt.data)
    assert back["input_ids"] == [1, PAD, 2, PAD]
    assert back["image_data"] == [b"c", b"d"]


def test_a_prompt_that_shows_other_images_is_refused() -> None:
    cat = shown(b"c", [2])
    for text in ("nothing", "<p> and <p>"):
        with pytest.raises(NotLaidOut, match="for 1 images"):
            expanded(text, [cat])
    for tokens in ([1, 2], [PAD, PAD, CLOSE], [OPEN, PAD, CLOSE], [1, OPEN, PAD, PAD]):
        with pytest.raises(NotLaidOut, match="part b'c'"):
            laid_out(array("I", tokens).tobytes(), [cat])
