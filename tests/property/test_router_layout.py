"""Prompts with images: their tokens are those of the model's own processor over the whole conversation."""

import asyncio
import hashlib
import io
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.block_key import token_list
from services.router.text.image_worker import Processor
from services.router.text.layout import Image, Layout, Shown
from services.router.text.tokenizer import Tokenizer, load_tokenizer
from tests.vision_model import picture, write_model

pytest.importorskip("transformers")
PICTURES = [picture(number, 16 * number, 50) for number in range(1, 9)]
PARTS = st.lists(
    st.one_of(st.integers(0, 7), st.sampled_from(["", "a", " b\n", "<row_1_col_1>", "é<|im_end|>"])), max_size=5
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def processor(model: Path) -> Processor:
    return Processor(str(model))


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return load_tokenizer(str(model))


@settings(deadline=None, max_examples=40)
@given(st.lists(PARTS, min_size=1, max_size=3))
def test_tokens_are_those_of_the_processor(
    processor: Processor, tokenizer: Tokenizer, turns: list[list[int | str]]
) -> None:
    from PIL import Image as Library

    messages: list[dict[str, Any]] = []
    images: list[bytes] = []
    for turn in turns:
        parts = [{"type": "image"} if isinstance(part, int) else {"type": "text", "text": part} for part in turn]
        messages.append({"role": "user", "content": parts})
        images += [PICTURES[part] for part in turn if isinstance(part, int)]
    shown = []
    for data in images:
        made = processor.layout(data, 1 << 20)
        layout = Layout(made["text"], made["ids"], made["placeholder"], made["id"])
        shown.append(Shown(Image(data, hashlib.sha256(data).digest(), "here"), layout))
    prompt = asyncio.run(tokenizer.encode_chat(messages, shown=shown))
    tokens = array("I", prompt.packed)
    for medium, each in zip(prompt.media, shown, strict=True):
        tokens[medium.first : medium.first + medium.tokens] = array("I", each.layout.packed)
    text = tokenizer.template.render(messages)
    opened = [Library.open(io.BytesIO(data)).convert("RGB") for data in images]
    whole = processor._processor(text=[text], images=[opened] if opened else None)["input_ids"][0]
    assert tokens.tolist() == list(whole)
    assert len(token_list(prompt.packed)) == len(whole)


def test_what_is_no_image_is_refused_with_value_and_limit(processor: Processor) -> None:
    assert processor.layout(picture(1, 40, 30), 1199)["refused"] == "has 40 x 30 pixels, the limit is 1199 pixels"
    assert "is no PNG, JPEG, WEBP, GIF image" in processor.layout(b"BM not that", 100)["refused"]
    assert "is no PNG" in processor.layout(picture(1)[:60], 1 << 20)["refused"]
