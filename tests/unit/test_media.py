"""Media in prompts: ids of placeholders, blocks that hold media, and where layouts stand."""

import hashlib
import json
import os
import subprocess
import sys
from array import array
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.block_key import PAIRS, PLAIN, full_blocks, token_bytes, token_list
from schemas.kv import BlockMedia
from schemas.media import Medium, block_media, placeholder_ids
from services.engine.sglang.media import media_arguments
from services.router.text.layout import Image, Layout, NotLaidOut, Shown, expanded, laid_out

CAT, DOG = (hashlib.sha256(name).digest() for name in (b"cat", b"dog"))
PAD, OPEN, CLOSE = 7, 8, 9
STUBS = Path(__file__).parents[2] / "services" / "engine" / "sglang" / "cpu_stubs"
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
import sys
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem
item = MultimodalDataItem(modality=Modality.IMAGE)
item.set_hash(int(sys.argv[1], 16))
print([number % (1 << 32) for number in item.padding_sequence(11)])
"""


@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed (extra `engine`)")
@pytest.mark.timeout(120)
def test_the_ids_are_those_of_sglang() -> None:
    (said,) = media_arguments(b"", [Medium(0, 1, CAT, 3, PAD)], [b"cat"])["mm_hashes"]
    path = os.environ | {"PYTHONPATH": str(STUBS)} if find_spec("torchvision") is None else os.environ
    asked = subprocess.run(
        [sys.executable, "-c", ASK_SGLANG, said], env=path, capture_output=True, text=True, check=True
    )
    assert json.loads(asked.stdout.splitlines()[-1]) == token_list(placeholder_ids(CAT, 11))


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
